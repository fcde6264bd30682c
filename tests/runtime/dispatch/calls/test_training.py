"""Gradients through the dispatcher: our backward where there is one, PyTorch's otherwise, and the same numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from blocktune.kernels import registry
from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.runtime.dispatch import dispatcher as dispatch
from blocktune.runtime.dispatch import obstacles, resolver
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.launches.plans import KernelPlan
from blocktune.runtime.dispatch.torch_attention import scaled_dot_product_attention
from blocktune.runtime.selection.ladder import Rung
from tests.support.fakes.dispatch_fakes import H200, ListSource, PlainKernel, shape_like, tensors
from tests.support.fakes.feature_fakes import pretend_features

pytestmark = pytest.mark.triton_free

SHAPE = shape_like(40, num_heads_kv=2)


class Forward(PlainKernel):
    """Writes the log-sum-exp too."""

    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> None:
            if config in self.broken:
                raise RuntimeError("out of resource: shared memory")
            self.launched.append(config)
            right, sums = attention_reference(q, k, v, causal=shape.causal, scale=scale)
            out.copy_(right)
            if lse is not None:
                lse.copy_(sums)

        return launch


class Backward(PlainKernel):
    """The gradients by their definition, from the log-sum-exp and the output that the forward left."""

    name: ClassVar[str] = "plain_bwd"
    direction: ClassVar[Direction] = Direction.BACKWARD

    def default_config(self, shape: AttentionShape, limits: Any) -> KernelConfig:
        return KernelConfig(self.name, 64, 32, 4, 2)

    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        def launch(*arguments: Any) -> None:
            if config in self.broken:
                raise RuntimeError("out of resource: registers")
            self.launched.append(config)
            q, k, v, out, lse, dout, dq, dk, dv, scale = arguments
            group = q.shape[1] // k.shape[1]
            wide_k, wide_v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
            scores = q @ wide_k.mT * scale
            if shape.causal != "none":
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
            p = torch.exp(scores - lse.masked_fill(lse.isneginf(), float("inf"))[..., None])
            ds = p * (dout @ wide_v.mT - (dout * out).sum(-1, keepdim=True)) * scale
            dq.copy_(ds @ wide_k)
            dk.copy_((ds.mT @ q).unflatten(1, (-1, group)).sum(2))
            dv.copy_((p.mT @ dout).unflatten(1, (-1, group)).sum(2))

        return launch


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> tuple[Forward, Backward]:
    """The CPU as an H200 with a kernel for either direction."""
    forward, backward = Forward(), Backward()
    monkeypatch.setattr(registry, "KERNELS", {kernel.name: kernel for kernel in (forward, backward)})
    for module in (obstacles, dispatch):
        monkeypatch.setattr(module, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: H200)
    return forward, backward


def gradients_of(attend: Any, inputs: list[Tensor], grad: Tensor, **options: Any) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    attend(*leaves, enable_gqa=True, **options).backward(grad)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_wrong_kernel_of_either_direction_costs_a_warning(
    kernels: tuple[Forward, Backward],
    wrong: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    honest = type(kernels[wrong]).bind

    def bind(self: Any, config: KernelConfig, shape: AttentionShape) -> Launch:
        launch = honest(self, config, shape)

        def lying(*arguments: Any) -> None:
            launch(*arguments)
            arguments[8 if wrong else 3].mul_(1.5)

        return lying

    monkeypatch.setattr(type(kernels[wrong]), "bind", bind)
    inputs, dispatcher = list(tensors(SHAPE)), Dispatcher(ListSource())
    grad = torch.randn_like(inputs[0])
    for _ in range(2):
        got = gradients_of(dispatcher, inputs, grad, scale=0.3)
        expected = gradients_of(scaled_dot_product_attention, inputs, grad, scale=0.3)
        torch.testing.assert_close(got, expected)
    assert caplog.text.count("is not used any more") == 1


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_are_pytorchs(kernels: tuple[Forward, Backward], layout: str, is_causal: bool) -> None:
    inputs = list(tensors(SHAPE, layout=layout))
    grad, dispatcher = torch.randn_like(inputs[0]), Dispatcher(ListSource())
    got = gradients_of(dispatcher, inputs, grad, is_causal=is_causal, scale=0.3)
    exact = [tensor.double() for tensor in inputs]
    expected = gradients_of(scaled_dot_product_attention, exact, grad.double(), is_causal=is_causal, scale=0.3)
    for one, right, tensor in zip(got, expected, inputs, strict=True):
        # two chained sums of float32: some tens of its roundings, which are 6e-8 each
        torch.testing.assert_close(one.double(), right, rtol=5e-6, atol=1e-5)
        assert one.stride() == tensor.stride()
    assert len(kernels[1].launched) == 2  # once to try it, once for this call
    assert dispatcher.explain(*[tensor.requires_grad_() for tensor in inputs], enable_gqa=True).rung is Rung.DEFAULT


def test_the_second_call_resolves_nothing(kernels: tuple[Forward, Backward]) -> None:
    inputs, dispatcher = list(tensors(SHAPE)), Dispatcher(source := ListSource())
    for _ in range(3):
        gradients_of(dispatcher, inputs, torch.ones_like(inputs[0]))
    assert source.reads == 1
    assert len(kernels[1].launched) == 1 + 3


def test_a_backward_that_does_not_launch_leaves_both_directions_to_pytorch(kernels: tuple[Forward, Backward]) -> None:
    forward, backward = kernels
    backward.broken.add(backward.default_config(SHAPE, H200.limits))
    inputs, dispatcher = list(tensors(SHAPE)), Dispatcher(ListSource())
    grad = torch.randn_like(inputs[0])
    for one, right in zip(
        gradients_of(dispatcher, inputs, grad),
        gradients_of(scaled_dot_product_attention, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(one, right)
    explanation = dispatcher.explain(*[tensor.requires_grad_() for tensor in inputs], enable_gqa=True)
    assert explanation.rung is Rung.SDPA
    assert "gradients are needed" in explanation.reason
    assert forward.launched == []


def test_only_wanted_gradients_are_returned(kernels: tuple[Forward, Backward]) -> None:
    query, key, value = tensors(SHAPE)
    Dispatcher(ListSource())(query, key.requires_grad_(), value, enable_gqa=True).sum().backward()
    assert key.grad is not None
    assert query.grad is None
    assert value.grad is None


def test_a_second_derivative_is_refused(kernels: tuple[Forward, Backward]) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in tensors(SHAPE))
    out = Dispatcher(ListSource())(query, key, value, enable_gqa=True)
    (first,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(UsageError, match=r"Attention is differentiable once.*SDPBackend\.MATH"):
        first.sum().backward()


def test_a_penalty_on_gradients_is_refused_and_not_left_out(kernels: tuple[Forward, Backward]) -> None:
    """The gradient of a sum is made from ones, which require none; it depends on the inputs all the same."""
    inputs = [tensor.requires_grad_() for tensor in tensors(SHAPE)]
    out = Dispatcher(ListSource())(*inputs, enable_gqa=True)
    first = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    loss = out.sum() + torch.stack([one.square().sum() for one in first]).sum()
    with pytest.raises(UsageError, match="differentiable once"):
        loss.backward()


def test_a_graph_over_the_gradients_holds_what_does_not_reach_attention(kernels: tuple[Forward, Backward]) -> None:
    query, key, value = tensors(SHAPE)
    factor = torch.tensor(2.0, requires_grad=True)
    out = Dispatcher(ListSource())(query.requires_grad_(), key, value, enable_gqa=True)
    (first,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    expected = gradients_of(scaled_dot_product_attention, [query, key, value], torch.ones_like(out))[0]
    torch.testing.assert_close(first.detach(), expected)
    (of_factor,) = torch.autograd.grad((first * factor).sum(), factor)
    torch.testing.assert_close(of_factor, expected.sum())


def test_nothing_of_the_size_of_the_scores_is_kept(kernels: tuple[Forward, Backward]) -> None:
    kept: list[int] = []
    inputs = [tensor.requires_grad_() for tensor in tensors(SHAPE)]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda x: x):
        Dispatcher(ListSource())(*inputs, enable_gqa=True)
    queries = SHAPE.batch * SHAPE.num_heads * SHAPE.seqlen_q
    assert sorted(kept) == sorted([*(tensor.numel() for tensor in inputs), inputs[0].numel(), queries])


def test_without_gradients_a_plan_without_log_sum_exp_serves(kernels: tuple[Forward, Backward]) -> None:
    dispatcher = Dispatcher(ListSource())
    inputs = [tensor.requires_grad_() for tensor in tensors(SHAPE)]
    with torch.no_grad():
        assert not dispatcher(*inputs, enable_gqa=True).requires_grad
    assert kernels[1].launched == []
    assert len(dispatcher.resolver.plans) == 1
    dispatcher(*inputs, enable_gqa=True)
    assert [type(plan) for plan in dispatcher.resolver.plans.values()] == [KernelPlan] * 3


def other_order(tensor: Tensor) -> Tensor:
    """The tensor with its dimensions the other way round in memory, where it has several."""
    return tensor.T.contiguous().T if tensor.dim() == 2 else tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def misaligned(tensor: Tensor) -> Tensor:
    memory = tensor.new_empty(tensor.numel() + 1)[1:]
    return memory.copy_(tensor.flatten()).view(tensor.shape)


@pytest.mark.parametrize("unpack", [other_order, misaligned, Tensor.contiguous])
def test_saved_tensors_that_come_back_laid_out_otherwise_are_laid_out_as_the_plan_needs(
    monkeypatch: pytest.MonkeyPatch, unpack: Callable[[Tensor], Tensor]
) -> None:
    """Kernels take columns to be next to each other, and a mask to be where it was."""
    _, backward = pretend_features(monkeypatch)
    seen: list[Any] = []
    bind = backward.bind

    def noting(config: KernelConfig, shape: AttentionShape) -> Any:
        launch = bind(config, shape)

        def run(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *rest: Any) -> None:
            mask = rest[-1].mask
            layout = [(one.stride(), one.data_ptr() % 16 == 0) for one in (q, k, v, out, lse, mask)]
            seen.append(layout)
            launch(q, k, v, out, lse, dout, *rest)

        return run

    monkeypatch.setattr(backward, "bind", noting)
    dispatcher = Dispatcher(ListSource())
    window = torch.randn(2, 4, 24 + 40, device="cpu").as_strided((2, 4, 24, 16), (256, 64, 1, 1))  # rows overlap
    q, k, v = torch.randn(2, 20, 4, 16).transpose(1, 2), window, torch.randn(2, 4, 24, 16)
    mask = (torch.rand(2, 1, 1, 24) > 0.3).expand(2, 4, 20, 24)

    def gradients(q: Tensor, k: Tensor, v: Tensor, attend: Any) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        out = attend(*leaves, mask)
        torch.manual_seed(1)
        return list(torch.autograd.grad(out, leaves, torch.randn(out.shape)))

    wanted = gradients(q, k, v, scaled_dot_product_attention)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        for _ in range(3):
            torch.testing.assert_close(gradients(q, k, v, dispatcher), wanted)
    trial, *launches = seen
    assert len(launches) >= 3
    assert all(launch == trial for launch in launches)

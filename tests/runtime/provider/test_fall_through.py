"""What PyTorch's own kernels go on to compute while the provider is active, and that they get what the program gave."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.attention.varlen import varlen_attn

from blocktune.runtime.dispatch.dispatcher import Dispatcher
from tests.support.attention.varlen_options import WRITES_IN_PLACE, takes_pages
from tests.support.fakes.dispatch_fakes import PlainKernel, pretend_h200
from tests.support.fakes.provider_fakes import Standins, provided

pytestmark = pytest.mark.triton_free

aten = torch.ops.aten


@pytest.fixture
def standins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standins]:
    """PyTorch's kernels, below ours, of which there is one without any feature and none with gradients."""
    pretend_h200(monkeypatch)
    made = Standins()
    with provided(made):
        yield made


def dense(head_dim: int = 16) -> list[Tensor]:
    return [torch.randn(2, 4, 24, head_dim, requires_grad=True) for _ in range(3)]


def check_sevens(out: Tensor) -> None:
    torch.testing.assert_close(out, torch.full_like(out, 7.0))


@pytest.mark.parametrize("is_causal", [False, True])
def test_dropout_is_pytorchs_in_both_directions(standins: Standins, is_causal: bool) -> None:
    for name, extra in (
        ("_scaled_dot_product_flash_attention", ()),
        ("_scaled_dot_product_cudnn_attention", (None, True)),
    ):
        tensors = dense()
        out = getattr(aten, name)(*tensors, *extra, 0.25, is_causal, scale=0.5)[0]
        check_sevens(out)
        gradients = torch.autograd.grad(out.sum(), tensors)
        assert all(bool((gradient == 3.0).all()) for gradient in gradients)
        (forward, given, options), (backward, *_) = standins.calls[-2:]
        assert (forward, backward) == (name, f"{name}_backward")
        place = 3 + len(extra)
        assert given[place : place + 2] == ((0.25, True) if is_causal else (0.25,))  # PyTorch drops a last default
        assert options == {"scale": 0.5}


def test_a_backward_that_is_not_ours_gets_our_forwards_results(standins: Standins) -> None:
    for name, extra in (
        ("_scaled_dot_product_flash_attention", ()),
        ("_scaled_dot_product_cudnn_attention", (None, True)),
    ):
        tensors = dense()
        out, lse, *_ = getattr(aten, name)(*tensors, *extra)
        assert standins.calls == []
        torch.autograd.grad(out.sum(), tensors)
        ((backward, given, _),) = standins.calls
        assert backward == f"{name}_backward"
        torch.testing.assert_close(given[4], out)
        torch.testing.assert_close(given[5], lse)
        standins.calls.clear()


WIDE = 144
"""No kernel here takes so many columns."""


@pytest.mark.parametrize("calls", [1, 3])
def test_what_no_kernel_takes_is_pytorchs_in_later_calls_too(standins: Standins, calls: int) -> None:
    tensors = dense(WIDE)
    for _ in range(calls):
        check_sevens(aten._scaled_dot_product_flash_attention(*tensors)[0])
        check_sevens(aten._scaled_dot_product_cudnn_attention(*tensors, torch.zeros(24, 24), True)[0])
    assert standins.names == ["_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"] * calls


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((0.5, False, False), {}),
        ((0.0, False, True), {}),
        ((0.0, False, False), {"alibi_slopes": torch.ones(4)}),
        ((0.0, False, False), {"seqused_k": torch.tensor([3, 4], dtype=torch.int32)}),
        pytest.param((0.0, False, False), {"num_splits": 2}, marks=takes_pages),
        ((0.0, False, False), {"scale": -1.0}),
        ((0.0, False, False), {"window_size_left": 4}),
    ],
)
def test_workers_fall_through(standins: Standins, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    tensors = [tensor.transpose(1, 2) for tensor in dense()]
    check_sevens(aten._flash_attention_forward(*tensors, None, None, 24, 24, *arguments, **options)[0])
    into = torch.empty_like(tensors[0]).detach()
    plain = [tensor.detach() for tensor in tensors]
    assert standins.names == ["_flash_attention_forward"]
    if WRITES_IN_PLACE:
        aten._flash_attention_forward_no_dropout_inplace(into, *plain, None, None, 24, 24, *arguments, **options)
        check_sevens(into)
        assert standins.names[1:] == ["_flash_attention_forward_no_dropout_inplace"]
    assert standins.calls[0][2] == options
    gradients = aten._flash_attention_backward(
        *plain[:1], *plain, into, torch.zeros(2, 4, 24), None, None, 24, 24, 0.5, False, *torch.zeros(2)
    )
    assert all(bool((gradient == 3.0).all()) for gradient in gradients)


@pytest.mark.parametrize("paged", [False, pytest.param(True, marks=takes_pages)])
@pytest.mark.parametrize("window", [(-1, -1), (4, 0)])
def test_packed_sequences_that_no_kernel_takes(standins: Standins, paged: bool, window: tuple[int, int]) -> None:
    query, begins = torch.randn(12, 2, 16), torch.tensor([0, 4, 12], dtype=torch.int32)
    keys, more = [torch.randn(12, 2, 16, requires_grad=not paged) for _ in range(2)], {}
    if paged:
        keys = [torch.randn(6, 4, 2, 16) for _ in range(2)]
        used = torch.tensor([3, 8], dtype=torch.int32)
        more = {"seqused_k": used, "block_table": torch.arange(6, dtype=torch.int32).view(2, 3)}
    out = varlen_attn(query, *keys, begins, None if paged else begins, 8, 12, window_size=window, **more)
    check_sevens(out)
    assert standins.names == ["_flash_attention_forward"]
    if not paged:
        gradients = torch.autograd.grad(out.sum(), keys)
        assert all(bool((gradient == 3.0).all()) for gradient in gradients)
        assert standins.names[1:] == ["_flash_attention_backward"]
    if not hasattr(varlen, "varlen_attn_out"):  # torch 2.11
        return
    into = torch.empty_like(query)
    plain = [key.detach() for key in keys]
    varlen.varlen_attn_out(into, query, *plain, begins, None if paged else begins, 8, 12, window_size=window, **more)
    check_sevens(into)
    assert standins.names[-1] == "_flash_attention_forward_no_dropout_inplace"


def test_masks_that_do_not_fit_are_pytorchs_to_judge(standins: Standins) -> None:
    for mask in (torch.zeros(3, 24), torch.zeros(24), torch.zeros(24, 24, dtype=torch.float64)):
        check_sevens(aten._scaled_dot_product_cudnn_attention(*dense(), mask, True)[0])
    assert len(standins.calls) == 3


def test_a_kernel_that_fails_to_launch_leaves_the_call_to_pytorch(
    monkeypatch: pytest.MonkeyPatch, standins: Standins
) -> None:
    def fail(self: PlainKernel, *arguments: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(PlainKernel, "bind", fail)
    check_sevens(aten._scaled_dot_product_cudnn_attention(*dense(), None, True)[0])


def test_no_kernel_before_is_said_in_clear_words(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_h200(monkeypatch)
    with provided(), pytest.raises(NotImplementedError, match="aten::_scaled_dot_product_cudnn_attention"):
        aten._scaled_dot_product_cudnn_attention(*dense(WIDE), None, True)


def test_plans_are_looked_up_once(monkeypatch: pytest.MonkeyPatch, standins: Standins) -> None:
    plans, plan_of = [], Dispatcher.plan

    def counted(self: Dispatcher, *arguments: Any) -> Any:
        plans.append(plan_of(self, *arguments))
        return plans[-1]

    monkeypatch.setattr(Dispatcher, "plan", counted)
    tensors, wide = dense(), dense(WIDE)
    for _ in range(3):
        for autocast in (False, True):
            with torch.autocast("cpu", enabled=autocast, dtype=torch.bfloat16):
                aten._scaled_dot_product_flash_attention(*tensors)
                aten._scaled_dot_product_flash_attention(*wide)
    assert len(plans) == 2

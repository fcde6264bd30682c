"""Our kernels in place of PyTorch's FlashAttention: asked for, restorable, and lossless where they do not serve."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention as registry
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from blocktune.integrations import replace_sdpa_flash, restore_sdpa_flash
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.shape import Direction
from blocktune.runtime.api import sdpa_override
from blocktune.runtime.api.sdpa_override import BACKWARD, FORWARD, NAME, override
from blocktune.runtime.dispatch.call import Call, PlanUse
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention
from blocktune.runtime.dispatch.launches.plans import KernelPlan, TorchPlan
from blocktune.runtime.dispatch.torch_math import mathematics
from blocktune.runtime.selection.explanation import Explanation
from blocktune.runtime.selection.ladder import Rung

pytestmark = pytest.mark.triton_free

flash = torch.ops.aten._scaled_dot_product_flash_attention


def is_replaced(key: str = "CUDA") -> bool:
    """Whether our kernels stand where there is none in a PyTorch without CUDA."""
    found = [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key) for name in (FORWARD, BACKWARD)]
    assert found[0] == found[1]
    return found[0]


@pytest.fixture
def _restored() -> Iterator[None]:
    yield
    restore_sdpa_flash()


@pytest.mark.skipif(torch.version.cuda is not None, reason="with CUDA the ops have kernels of their own")
@pytest.mark.usefixtures("_restored")
def test_kernels_are_replaced_and_restored() -> None:
    assert not is_replaced()
    replace_sdpa_flash()
    assert is_replaced()
    assert registry.current_flash_attention_impl() == NAME
    replace_sdpa_flash()
    assert is_replaced()
    restore_sdpa_flash()
    assert not is_replaced()
    assert registry.current_flash_attention_impl() is None


def test_restoring_leaves_others_alone() -> None:
    class Handle:
        removed = False

        def remove(self) -> None:
            self.removed = True

    handle = Handle()
    registry.register_flash_attention_impl("somebody's", register_fn=lambda: handle)
    registry.activate_flash_attention_impl("somebody's")
    restore_sdpa_flash()
    assert registry.current_flash_attention_impl() == "somebody's"
    registry.restore_flash_attention_impl()
    assert handle.removed


def test_importing_replaces_nothing() -> None:
    code = (
        "import blocktune.integrations\n"
        "from torch.nn import attention as registry\n"
        "assert registry.current_flash_attention_impl() is None\n"
        "assert 'blocktune' not in registry.list_flash_attention_impls()\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_other_schemas_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sdpa_override._SCHEMAS, FORWARD, ("query key value", "Tensor"))
    with pytest.raises(UsageError, match="to be replaced"):
        replace_sdpa_flash()
    assert registry.current_flash_attention_impl() is None


class MathPlan:
    """Stands for a plan of ours, on the CPU."""

    call: Call

    def __init__(self) -> None:
        self.directions: list[Direction] = []

    def of(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, direction: Direction, *use: PlanUse
    ) -> "MathPlan":
        """In the place of `Dispatcher.plan`."""
        self.call = call
        return self

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float, extras: Extras) -> tuple[Tensor, Tensor]:
        self.directions.append(Direction.FORWARD)
        assert (scale, extras) == (self.call.scale, self.call.extras)
        return mathematics(query, key, value, self.call, lse=True)

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        scale: float,
        extras: Extras,
    ) -> tuple[Tensor, ...]:
        self.directions.append(Direction.BACKWARD)
        assert (scale, extras) == (self.call.scale, self.call.extras)
        assert lse.shape == query.shape[:3]
        return attention.backward(query, key, value, out, lse, grad, self.call)


@pytest.fixture
def _on_cpu() -> Iterator[None]:
    """The ops have our kernels on the CPU, where nobody else's stand."""
    handle = override("CPU")
    assert is_replaced("CPU")
    yield
    handle.remove()
    assert not is_replaced("CPU")


def inputs(seqlen_k: int = 24) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, length, 16, requires_grad=True) for length in (24, seqlen_k, seqlen_k)]


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_plans_compute_the_op_and_its_gradients(
    monkeypatch: pytest.MonkeyPatch, is_causal: bool, scale: float | None
) -> None:
    plan = MathPlan()
    monkeypatch.setattr(Dispatcher, "plan", lambda self, *arguments: plan.of(*arguments))
    tensors, others = inputs(), inputs()
    out, lse, _, _, max_q, max_k, *_ = flash(*tensors, 0.0, is_causal, scale=scale)
    assert (max_q, max_k, lse.dtype) == (24, 24, torch.float32)
    out.sum().backward()
    assert plan.directions == [Direction.FORWARD, Direction.BACKWARD]
    wanted = scaled_dot_product_attention(*others, is_causal=is_causal, scale=scale)
    torch.testing.assert_close(out, wanted)
    wanted.sum().backward()
    for tensor, other in zip(tensors, others, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad)


class Pytorchs:
    """Stands on the CPU for the ops that PyTorch's own kernels are, [batch, seqlen, heads, dim]; keeps what it got."""

    def __init__(self) -> None:
        self.options: list[tuple[Any, ...]] = []

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *options: Any, scale: float | None = None
    ) -> tuple[Tensor, ...]:
        self.options.append((*options, scale))
        seed, offset = (torch.tensor(number, dtype=torch.uint64) for number in (7, 8))
        return query + key, query.new_zeros(2, 4, 24), seed, offset, query.new_empty(0)

    def backward(self, grad: Tensor, *others: Any, scale: float | None = None) -> tuple[Tensor, ...]:
        self.options.append((*others[5:], scale))  # behind query, key, value, output and log-sum-exp
        return grad, 2 * grad, 3 * grad


@pytest.fixture
def theirs() -> Iterator[Pytorchs]:
    stand_in = Pytorchs()
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", stand_in.forward, "CPU")
        library.impl("_flash_attention_backward", stand_in.backward, "CPU")
        yield stand_in


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_what_our_kernels_do_not_compute_stays_pytorchs(theirs: Pytorchs, dropout_p: float) -> None:
    tensors = inputs()
    out = flash(*tensors, dropout_p, True, scale=0.5)[0]
    torch.testing.assert_close(out, tensors[0] + tensors[1])
    out.sum().backward()
    gradients = [float(tensor.grad.mean()) for tensor in tensors if tensor.grad is not None]
    assert gradients == [1.0, 2.0, 3.0]
    forward, backward = theirs.options
    assert forward == (None, None, 24, 24, dropout_p, True, False, 0.5)
    assert backward[:6] == (None, None, 24, 24, dropout_p, True)
    assert [int(number) for number in backward[6:8]] == [7, 8]


@pytest.mark.usefixtures("_on_cpu")
def test_lengths_that_differ_are_never_causal_by_our_corner(theirs: Pytorchs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dispatcher, "plan", lambda self, *arguments: pytest.fail("our plan was asked"))
    query, key, value = (torch.randn(2, 4, length, 16) for length in (24, 1, 1))
    flash(query, key, value, 0.0, True)
    assert theirs.options[0][2:6] == (24, 1, 0.0, True)


def on_gpu(seqlen: int = 512, *, grad: bool = False, heads_kv: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((2, seqlen, heads, 64) for heads in (8, heads_kv, heads_kv))
    made = [torch.randn(size, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for size in sizes]
    return [tensor.requires_grad_(grad) for tensor in made]


def launches() -> int:
    """How often our kernels ran, in either direction."""
    plans = attention._resolver.plans.values()
    return sum(plan.calls for plan in plans if isinstance(plan, KernelPlan))


@pytest.mark.gpu
@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_sdpa_runs_our_kernels_on_the_gpu(is_causal: bool, compiled: bool) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    run = torch.compile(attend, fullgraph=True) if compiled else attend
    tensors, others = on_gpu(grad=True), on_gpu(grad=True)
    replace_sdpa_flash()
    before = launches()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = run(*tensors)
        out.float().square().sum().backward()
    assert launches() >= before + 2
    restore_sdpa_flash()
    after = launches()
    with sdpa_kernel(SDPBackend.MATH):
        wanted = attend(*others)
        wanted.float().square().sum().backward()
    assert launches() == after
    assert out.stride() == tensors[0].stride()
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    for tensor, other in zip(tensors, others, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("_restored")
def test_dropout_and_mixed_directions_stay_lossless_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout PyTorch computes both; where only our forward serves, its backward takes our log-sum-exp."""
    replace_sdpa_flash()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        tensors = on_gpu(grad=True)
        before = launches()
        scaled_dot_product_attention(*tensors, dropout_p=0.5).sum().backward()
        assert launches() == before

        plan_of = Dispatcher.plan

        def forward_only(self: Dispatcher, *arguments: Any) -> Any:
            if arguments[-1] is Direction.BACKWARD:
                return TorchPlan(Explanation(rung=Rung.SDPA, reason="the test wants it"))
            return plan_of(self, *arguments)

        monkeypatch.setattr(Dispatcher, "plan", forward_only)
        tensors, others = on_gpu(grad=True), on_gpu(grad=True)
        scaled_dot_product_attention(*tensors, is_causal=True).sum().backward()
        restore_sdpa_flash()
        scaled_dot_product_attention(*others, is_causal=True).sum().backward()
    for tensor, other in zip(tensors, others, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("_restored")
def test_restoring_gives_pytorchs_bits_back_on_the_gpu() -> None:
    tensors = on_gpu()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        first = scaled_dot_product_attention(*tensors)
        replace_sdpa_flash()
        ours = scaled_dot_product_attention(*tensors)
        restore_sdpa_flash()
        again = scaled_dot_product_attention(*tensors)
    assert torch.equal(first, again)
    torch.testing.assert_close(ours, first, rtol=2e-2, atol=2e-2)

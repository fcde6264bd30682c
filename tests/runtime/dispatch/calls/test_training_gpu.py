"""Gradients on a GPU, as a training step asks for them: our kernels against PyTorch's in float32."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from blocktune import BlockMask, attention, block_sparse_attention, flash_attn_varlen_func
from blocktune.kernels.values.dropout import keep_mask
from blocktune.runtime.dispatch.launches.plans import TorchPlan
from blocktune.runtime.selection.ladder import Rung

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]

ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative Frobenius error of a gradient."""


@pytest.fixture(autouse=True)
def no_plans() -> None:
    """Plans are made by the test alone, and not made again when a file has been read."""
    attention.reload()
    attention._settle(None)


def leaves(
    heads_kv: int, length_q: int, length_k: int, dim: int, dtype: torch.dtype, *, bshd: bool
) -> list[torch.Tensor]:
    made = []
    for heads, length in ((8, length_q), (heads_kv, length_k), (heads_kv, length_k)):
        sizes = (2, length, heads, dim) if bshd else (2, heads, length, dim)
        tensor = torch.randn(sizes, device="cuda", dtype=dtype)
        made.append((tensor.transpose(1, 2) if bshd else tensor).requires_grad_())
    return made


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("heads_kv", "length_q", "length_k", "dim"),
    [(8, 1024, 1024, 64), (2, 512, 512, 128), (4, 200, 333, 64), (8, 77, 77, 96)],
)
@pytest.mark.parametrize("dtype", list(ERROR))
def test_gradients_are_those_of_float32(
    dtype: torch.dtype, heads_kv: int, length_q: int, length_k: int, dim: int, is_causal: bool, bshd: bool
) -> None:
    torch.manual_seed(0)
    inputs = leaves(heads_kv, length_q, length_k, dim, dtype, bshd=bshd)
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    grad = torch.randn(2, 8, length_q, dim, device="cuda", dtype=dtype)
    out = attention(*inputs, is_causal=is_causal, enable_gqa=True)
    out.backward(grad)
    sdpa(*exact, is_causal=is_causal, enable_gqa=True).backward(grad.float())
    for tensor, right in zip(inputs, exact, strict=True):
        assert tensor.grad is not None
        assert right.grad is not None
        assert tensor.grad.stride() == tensor.stride()
        assert (tensor.grad.float() - right.grad).norm() <= ERROR[dtype] * right.grad.norm()
    assert attention.explain(*inputs, is_causal=is_causal, enable_gqa=True).rung is not Rung.SDPA


def test_an_expanded_gradient_and_checkpointing_work() -> None:
    inputs = leaves(8, 256, 256, 64, torch.bfloat16, bshd=False)
    attention(*inputs, is_causal=True).sum().backward()
    plain = [tensor.grad for tensor in inputs]
    again = [tensor.detach().requires_grad_() for tensor in inputs]
    checkpoint(lambda *tensors: attention(*tensors, is_causal=True), *again, use_reentrant=False).sum().backward()
    for one, two in zip(plain, again, strict=True):
        torch.testing.assert_close(one, two.grad, atol=1e-2, rtol=1e-2)


def doubled(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in inputs]


def assert_close_to(got: Iterable[torch.Tensor], right: Iterable[torch.Tensor], bound: float = 1e-2) -> None:
    for one, exact in zip(got, right, strict=True):
        assert (one.double() - exact.double()).norm() <= bound * exact.double().norm()


def assert_ours() -> None:
    """Nothing since the test began went to PyTorch."""
    plans = attention._resolver.plans
    assert plans
    assert not any(isinstance(plan, TorchPlan) for plan in plans.values())


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize(
    "mask",
    [
        lambda: torch.rand(2, 1, 1, 333, device="cuda") > 0.3,
        lambda: torch.rand(200, 333, device="cuda") > 0.3,
        lambda: torch.randn(1, 8, 200, 333, device="cuda", dtype=torch.bfloat16),
        lambda: torch.randn(2, 8, 200, 333, device="cuda").masked_fill(
            torch.rand(200, 333, device="cuda") > 0.8, float("-inf")
        ),
    ],
)
def test_masks_train(mask: Callable[[], torch.Tensor], bshd: bool) -> None:
    torch.manual_seed(0)
    inputs, bias = leaves(4, 200, 333, 64, torch.bfloat16, bshd=bshd), mask()
    exact, grad = doubled(inputs), torch.randn(2, 8, 200, 64, device="cuda", dtype=torch.bfloat16)
    out = attention(*inputs, bias, enable_gqa=True)
    right = sdpa(*exact, bias if bias.dtype is torch.bool else bias.double(), enable_gqa=True)
    assert_close_to(
        [out, *torch.autograd.grad(out, inputs, grad)], [right, *torch.autograd.grad(right, exact, grad.double())]
    )
    assert_ours()


def test_dropout_is_philox_of_the_generators_state() -> None:
    inputs = leaves(8, 200, 333, 64, torch.bfloat16, bshd=False)
    attention(*inputs, dropout_p=0.3)
    torch.cuda.manual_seed(11)
    offset = torch.cuda.default_generators[0].get_offset()
    out = attention(*inputs, dropout_p=0.3)
    exact, grad = doubled(inputs), torch.randn_like(out)
    kept = keep_mask(2, 8, 200, 333, 0.3, 11, offset, "cuda")
    right = ((exact[0] @ exact[1].mT / 8).softmax(-1) * kept / 0.7) @ exact[2]
    assert_close_to(
        [out, *torch.autograd.grad(out, inputs, grad)], [right, *torch.autograd.grad(right, exact, grad.double())]
    )
    assert torch.cuda.default_generators[0].get_offset() > offset
    assert_ours()


def test_deterministic_gradients_are_equal_to_the_bit() -> None:
    inputs = leaves(4, 1024, 1000, 64, torch.bfloat16, bshd=False)
    grad = torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (
            torch.autograd.grad(attention(*inputs, is_causal=True, enable_gqa=True), inputs, grad) for _ in range(4)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, right) for other in others for one, right in zip(other, first, strict=True))
    assert_ours()


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("is_causal", [False, True])
def test_block_masks_train(is_causal: bool, block: int) -> None:
    inputs = leaves(4, 512, 512, 64, torch.bfloat16, bshd=False)
    mask = BlockMask(block, block, torch.rand(1, 8, 512 // block, 512 // block, device="cuda") < 0.4)
    exact, grad = doubled(inputs), torch.randn(2, 8, 512, 64, device="cuda", dtype=torch.bfloat16)
    out = block_sparse_attention(*inputs, mask, is_causal=is_causal)
    seen = mask.to_dense(512, 512)
    right = sdpa(*exact, seen.tril() if is_causal else seen, enable_gqa=True)
    assert_close_to(
        [out, *torch.autograd.grad(out, inputs, grad)], [right, *torch.autograd.grad(right, exact, grad.double())]
    )
    assert_ours()


def test_a_training_step_waits_for_nothing_and_is_captured() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # PyTorch captures gradients of leaves that were made on the stream of the capture
        inputs = leaves(8, 256, 256, 64, torch.bfloat16, bshd=False)
        mask, grad = torch.rand(2, 1, 1, 256, device="cuda") > 0.3, torch.randn(2, 8, 256, 64, device="cuda")

    def step() -> list[torch.Tensor]:
        out = attention(*inputs, mask)
        return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]

    with torch.cuda.stream(side):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = step()
    with torch.cuda.stream(side):
        with torch.no_grad():
            for tensor in inputs:
                tensor.normal_()
        graph.replay()
        torch.testing.assert_close(captured, step(), atol=1e-2, rtol=1e-2)
    assert_ours()


def test_packed_sequences_wait_for_the_gpu_once() -> None:
    q, k, v = (torch.randn(700, 8, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))

    def step(*lengths: int) -> None:
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
        torch.cuda.set_sync_debug_mode("error" if attention._resolver.plans else "default")
        try:
            out = flash_attn_varlen_func(q, k, v, bounds, bounds, 512, 512, dropout_p=0.1, causal=True)
            torch.autograd.grad(out.sum(), (q, k, v))
        finally:
            torch.cuda.set_sync_debug_mode("default")

    step(100, 500, 99)
    step(512, 3, 4)
    assert_ours()
    assert len(attention._resolver.plans) == 2


def test_autocast_trains_by_our_kernels() -> None:
    inputs = leaves(8, 256, 256, 64, torch.float32, bshd=False)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = attention(*inputs, is_causal=True)
    assert out.dtype is torch.bfloat16
    got, exact = torch.autograd.grad(out.sum(), inputs), doubled(inputs)
    assert_close_to(got, torch.autograd.grad(sdpa(*exact, is_causal=True).sum(), exact), 2e-2)
    assert_ours()

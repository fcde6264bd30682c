"""Gradients on a GPU, as a training step asks for them: our kernels against PyTorch's in float32."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from blocktune import attention
from blocktune.kernels.ladder import Rung

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")]

ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative Frobenius error of a gradient."""


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
    served = length_q % 128 == length_k % 128 == 0 and dim in (64, 128)  # what has a dense backward of ours
    assert (attention.explain(*inputs, is_causal=is_causal, enable_gqa=True).rung is not Rung.SDPA) is served


def test_an_expanded_gradient_and_checkpointing_work() -> None:
    inputs = leaves(8, 256, 256, 64, torch.bfloat16, bshd=False)
    attention(*inputs, is_causal=True).sum().backward()
    plain = [tensor.grad for tensor in inputs]
    again = [tensor.detach().requires_grad_() for tensor in inputs]
    checkpoint(lambda *tensors: attention(*tensors, is_causal=True), *again, use_reentrant=False).sum().backward()
    for one, two in zip(plain, again, strict=True):
        torch.testing.assert_close(one, two.grad, atol=1e-2, rtol=1e-2)


def test_compiled_attention_trains() -> None:
    inputs = leaves(8, 256, 256, 64, torch.bfloat16, bshd=False)
    torch.compile(lambda *tensors: attention(*tensors, is_causal=True), fullgraph=True)(*inputs).sum().backward()
    assert all(tensor.grad is not None and bool(tensor.grad.isfinite().all()) for tensor in inputs)

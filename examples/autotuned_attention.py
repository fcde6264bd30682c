"""An attention as many people write it, under `blocktune.autotune`: the tuner knows nothing about attention here.

python examples/autotuned_attention.py

On a GPU it prints what was chosen and what PyTorch's own attention takes. Without one it compiles a config for an H200.
"""

import torch
import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from triton import language as tl

from blocktune import autotune, offline, space


@autotune(
    configs=space(BLOCK_M=(64, 128), BLOCK_N=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 3, 4)),
    key=["seqlen", "HEAD_DIM", "IS_CAUSAL"],
)
@triton.jit
def attention_kernel(
    q, k, v, out, scale, seqlen, HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head; all tensors are dense, [heads, seqlen, HEAD_DIM]."""
    head = tl.program_id(1).to(tl.int64) * seqlen * HEAD_DIM
    rows, columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_DIM)
    queries = tl.load(q + head + rows[:, None] * HEAD_DIM + dims, (rows < seqlen)[:, None], other=0.0)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    last = min(seqlen, (tl.program_id(0) + 1) * BLOCK_M) if IS_CAUSAL else seqlen
    for start in range(0, last, BLOCK_N):
        keys = start + columns
        inside = keys < seqlen
        of_k = tl.load(k + head + keys[None, :] * HEAD_DIM + dims[:, None], inside[None, :], other=0.0)
        scores = tl.dot(queries, of_k) * (scale * 1.4426950408889634)
        visible = inside[None, :] & (keys[None, :] <= rows[:, None]) if IS_CAUSAL else inside[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        of_v = tl.load(v + head + keys[:, None] * HEAD_DIM + dims, inside[:, None], other=0.0)
        result = tl.dot(weights.to(of_v.dtype), of_v, result * shrink[:, None])
        largest = larger
    result = result / total[:, None]
    tl.store(out + head + rows[:, None] * HEAD_DIM + dims, result.to(out.dtype.element_ty), (rows < seqlen)[:, None])


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
    """Return the attention of dense tensors [heads, seqlen, head_dim]."""
    heads, seqlen, head_dim = q.shape
    out = torch.empty_like(q)

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(seqlen, meta["BLOCK_M"]), heads

    attention_kernel[grid](q, k, v, out, head_dim**-0.5, seqlen, HEAD_DIM=head_dim, IS_CAUSAL=is_causal)
    return out


def on_the_gpu() -> None:
    from triton.testing import do_bench

    q, k, v = (torch.randn(32, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def pytorch() -> Tensor:
        return scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]

    torch.testing.assert_close(attention(q, k, v), pytorch(), rtol=2e-2, atol=2e-2)
    for choice in attention_kernel.kernel.choices.values():
        print(choice)
    print(f"PyTorch takes {1e3 * do_bench(pytorch):.1f} us, this {1e3 * do_bench(lambda: attention(q, k, v)):.1f} us")


def without_a_gpu() -> None:
    signature = "*bf16, *bf16, *bf16, *bf16, fp32, i32:16"
    config = {"HEAD_DIM": 128, "IS_CAUSAL": True, "BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
    print(offline.compile(attention_kernel, signature, config, device="h200"))


if __name__ == "__main__":
    on_the_gpu() if torch.cuda.is_available() else without_a_gpu()

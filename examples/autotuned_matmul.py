"""A matrix product as Triton's tutorial has it, under `blocktune.autotune`.

python examples/autotuned_matmul.py

On a GPU it prints what was chosen, and what was left out and why. Without one it compiles a config for an H200, which
needs no GPU, and says how many blocks fit a multiprocessor and what limits them.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from blocktune import autotune, offline, space


@autotune(
    configs=space(
        BLOCK_M=(64, 128), BLOCK_N=(64, 128, 256), BLOCK_K=(32, 64), GROUP_M=(8,), num_warps=(4, 8), num_stages=(3, 4)
    ),
    key=["M", "N", "K"],
)
@triton.jit
def matmul_kernel(
    a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr
):
    """c = a b, all dense. Blocks of GROUP_M rows share columns of b, which the L2 cache then holds."""
    place, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = place // (GROUP_M * tiles_n)
    first = group * GROUP_M
    size = min(tiles_m - first, GROUP_M)
    tile_m = first + (place % (GROUP_M * tiles_n)) % size
    tile_n = (place % (GROUP_M * tiles_n)) // size
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    steps = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = K - start
        of_a = tl.load(a + rows[:, None] * K + start + steps[None, :], steps[None, :] < left, other=0.0)
        of_b = tl.load(b + (start + steps[:, None]) * N + columns[None, :], steps[:, None] < left, other=0.0)
        total = tl.dot(of_a, of_b, total)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(c.dtype.element_ty), inside)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of two dense matrices."""
    (rows, inner), columns = a.shape, b.shape[1]
    c = torch.empty(rows, columns, dtype=a.dtype, device=a.device)

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(rows, meta["BLOCK_M"]) * triton.cdiv(columns, meta["BLOCK_N"]),)

    matmul_kernel[grid](a, b, c, rows, columns, inner)
    return c


def on_the_gpu() -> None:
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    difference = (matmul(a, b).float() - (a @ b).float()).abs().max().item()
    print(f"largest difference: {difference:.1e}")
    for choice in matmul_kernel.kernel.choices.values():
        print(choice)


def without_a_gpu() -> None:
    signature = "*bf16, *bf16, *bf16, i32:16, i32:16, i32:16"
    config = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 3}
    print(offline.compile(matmul_kernel, signature, config, device="h200"))


if __name__ == "__main__":
    on_the_gpu() if torch.cuda.is_available() else without_a_gpu()

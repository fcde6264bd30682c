"""A softmax of rows under `blocktune.autotune`: the import is all that differs from `triton.autotune`.

python examples/autotuned_softmax.py

The first call of a kind compiles all configs at once, measures them in turns and keeps the fastest; later processes
launch it at once. Without a GPU PyTorch computes, and every config is compiled for an H200: what each takes of it.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from blocktune import autotune, offline, space


@autotune(configs=space(BLOCK=(1024, 2048, 4096), num_warps=(2, 4, 8, 16)), key=["columns"])
@triton.jit
def softmax_kernel(out, x, row_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        values = tl.load(x + row * row_stride + start + offsets, inside, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(values - larger), 0)
        largest = larger
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        values = tl.load(x + row * row_stride + start + offsets, inside, other=0.0).to(tl.float32)
        tl.store(out + row * columns + start + offsets, tl.exp(values - largest) / total, inside)


def softmax(x: Tensor) -> Tensor:
    """The softmax of the rows of a matrix."""
    if not x.is_cuda:
        return torch.softmax(x, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    softmax_kernel[(x.shape[0],)](out, x, x.stride(0), x.shape[1])
    return out


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(4096, 2000, device="cuda" if torch.cuda.is_available() else "cpu")
    rows = softmax(x)
    print(f"largest difference: {(rows - torch.softmax(x, dim=-1)).abs().max().item():.1e}")
    print(f"{len(softmax_kernel.configs)} configs, tuned for each value of {', '.join(softmax_kernel.keys)}")
    if x.is_cuda:
        print(softmax_kernel.explain(torch.empty_like(x), x, x.stride(0), x.shape[1], grid=(x.shape[0],)))
    else:
        print(offline.explain(lambda: softmax(torch.randn(4096, 2000, device="cuda")), device="h200"))


if __name__ == "__main__":
    main()

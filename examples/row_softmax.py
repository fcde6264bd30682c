"""A softmax of rows as a Triton kernel whose parameters are tuned; `tuned_softmax.py` runs it.

It has a module of its own because candidates run in a process of their own, which imports it.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from blocktune import tuned


@triton.jit
def softmax_kernel(out, x, row_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x + row * row_stride + offsets, offsets < columns, other=float("-inf")).to(tl.float32)
    weights = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * columns + offsets, weights / tl.sum(weights, 0), offsets < columns)


@tuned(
    parameters={"block": (1024, 2048, 4096, 8192), "num_warps": (1, 2, 4, 8, 16)},
    constraints={"a block covers a row": lambda config, x: config["block"] >= x.shape[1]},
    reference=lambda x: torch.softmax(x, dim=-1),
)
def softmax(x: Tensor, *, block: int, num_warps: int) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    softmax_kernel[(x.shape[0],)](out, x, x.stride(0), x.shape[1], BLOCK=block, num_warps=num_warps)
    return out

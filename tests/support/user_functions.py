"""Tuned functions for tests: a softmax in Triton, and some in plain PyTorch that fail in every way that a kernel can.

The worker imports this module in its own process; harm is done only there.
"""

import os
import time

import torch
import triton
from triton import language as tl

from blocktune.kernels.tuned.function import tuned


@triton.jit
def softmax_kernel(out, x, row_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x + row * row_stride + offsets, offsets < columns, other=float("-inf")).to(tl.float32)
    weights = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * columns + offsets, weights / tl.sum(weights, 0), offsets < columns)


@tuned(
    parameters={"block": (256, 512, 1024, 2048, 4096, 8192), "num_warps": (1, 2, 4, 8, 16)},
    constraints={"a block covers a row": lambda config, x: config["block"] >= x.shape[1]},
    reference=lambda x: torch.softmax(x, dim=-1),
)
def softmax(x: torch.Tensor, *, block: int, num_warps: int) -> torch.Tensor:
    """Softmax of the rows of a matrix."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    softmax_kernel[(x.shape[0],)](out, x, x.stride(0), x.shape[1], BLOCK=block, num_warps=num_warps)
    return out


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@tuned(
    parameters={"block": (16, 32, 64, 128, 256)},
    constraints={"block <= columns": lambda config, x: config["block"] <= x.shape[1]},
    reference=doubled,
)
def risky(x: torch.Tensor, *, block: int) -> torch.Tensor:
    """Is right and slow with a block of 16 and right and fast with one of 32; larger ones are wrong, raise or die."""
    out = 2 * x
    match block:
        case 16:
            time.sleep(2e-3)
        case 64:
            out[-1] += 0.1
        case 128:
            raise RuntimeError("no such instruction")
        case 256:
            os.abort()
    return out


@tuned(parameters={"block": (16, 32)}, reference=doubled)
def hanging(x: torch.Tensor, *, block: int) -> torch.Tensor:
    """Hangs with the larger block."""
    if block == 32:
        time.sleep(1000)
    return 2 * x


@tuned(parameters={"block": (16,)}, reference=doubled)
def hopeless(x: torch.Tensor, *, block: int) -> torch.Tensor:
    return x * block

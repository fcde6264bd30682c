"""Kernels under `@triton.autotune`, as a library would have them; compile workers import this module."""

from typing import Any

import torch
import triton
from triton import language as tl

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=num_warps) for block in (128, 256, 512) for num_warps in (2, 4)]


@triton.jit
def scaled(value, factor):
    return value * factor


@triton.autotune(configs=CONFIGS, key=["n"], restore_value=["x"])
@triton.jit
def scale_kernel(x, n, factor, BLOCK: tl.constexpr):
    """Scale in place."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets, offsets < n)
    tl.store(x + offsets, scaled(values, factor), offsets < n)


@triton.autotune(configs=CONFIGS, key=["n"])
@triton.heuristics({"IS_EVEN": lambda named: named["n"] % named["BLOCK"] == 0})
@triton.jit
def sum_kernel(out, x, n, BLOCK: tl.constexpr, IS_EVEN: tl.constexpr):
    """Add up a vector."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets) if IS_EVEN else tl.load(x + offsets, offsets < n, other=0.0)
    tl.atomic_add(out, tl.sum(values, 0))


@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def faulty_kernel(x, n, BLOCK: tl.constexpr):
    """Fill with ones; with a block of 512 it also writes where no memory is."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, 1.0, offsets < n)
    if BLOCK == 512:
        far = n.to(tl.int64) << 32
        tl.store(x + far + offsets, 1.0)


HARMLESS = [triton.Config({"BLOCK": block}) for block in (128, 1024)]
HARMFUL = [triton.Config({"BLOCK": block}) for block in (256, 512)]


@triton.autotune(configs=[*HARMFUL, *HARMLESS], key=["n"])
@triton.jit
def harmful_kernel(x, flag, n, BLOCK: tl.constexpr):
    """Fill with ones; with a block of 256 it waits for a flag for ever, with 512 it also writes where no memory is."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, 1.0, offsets < n)
    if BLOCK == 256:
        flagged = tl.load(flag, volatile=True)
        while flagged == 0:
            flagged = tl.load(flag, volatile=True)
    if BLOCK == 512:
        far = n.to(tl.int64) << 32
        tl.store(x + far + offsets, 1.0)


@triton.constexpr_function
def fatal(block):
    import os  # what it names is no part of the source that Triton hashes

    if block == 256:
        os.abort()
    return block


@triton.autotune(configs=[triton.Config({"BLOCK": block}) for block in (128, 256, 512)], key=["n"])
@triton.jit
def fatal_kernel(x, n, BLOCK: tl.constexpr):
    """Fill with ones; the compile with a block of 256 ends its process."""
    size: tl.constexpr = fatal(BLOCK)
    offsets = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(x + offsets, 1.0, offsets < n)


@triton.constexpr_function
def lingering(block):
    import time

    if block > 128:
        time.sleep(60)
    return block


@triton.autotune(configs=[triton.Config({"BLOCK": block}) for block in (128, 256, 512)], key=["n"])
@triton.jit
def lingering_kernel(x, n, BLOCK: tl.constexpr):
    """Fill with ones; the compile of a block above 128 takes a minute."""
    size: tl.constexpr = lingering(BLOCK)
    offsets = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(x + offsets, 1.0, offsets < n)


@triton.jit
def row_kernel(rows, out, n, BLOCK: tl.constexpr):
    """Add up a row, which a descriptor loads in blocks."""
    row, total = tl.program_id(0), 0.0
    for start in range(0, n, BLOCK):
        total += tl.sum(tl.reshape(rows.load([row, start]), [BLOCK]))  # which only compiles with a block of this size
    tl.store(out + row, total)


def scale_arguments(n: int = 1000) -> dict[str, Any]:
    """Arguments of `scale_kernel`, as a user makes them for `tune run`."""
    x = torch.ones(n)
    return {"x": x, "n": n, "factor": 2.0, "grid": lambda meta: (triton.cdiv(n, meta["BLOCK"]),)}

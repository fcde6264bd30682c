"""The block sizes that the FlashAttention paper prescribes: a named baseline, not a recommendation.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (arXiv 2205.14135),
Algorithm 1, line 1: with on-chip memory of M elements and head dimension d,

    Bc = ceil(M / 4d)  keys per tile        Br = min(ceil(M / 4d), d)  queries per tile

so that the tiles of Q, K, V and O fill the memory together.
"""

from collections.abc import Iterable
from dataclasses import replace

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Direction

SMALLEST_BLOCK = 16
"""The matrix units take no smaller tile."""

NUM_WARPS = 4
"""Of what the paper leaves open: the usual block of 128 threads, which is Triton's default too."""


def paper_blocks(shape: AttentionShape, limits: ComputeLimits) -> tuple[int, int]:
    """Return the Br and Bc of the rule, as the paper has them, where M is the shared memory that one block can have."""
    memory_elements = limits.shared_per_block_optin_bytes // shape.element_bytes
    keys = -(-memory_elements // (4 * shape.head_dim))
    return min(keys, shape.head_dim), keys


def paper_config(kernel: AttentionKernel, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig | None:
    """Return the paper's config as this kernel can express it, or None where it cannot.

    M is the shared memory that one block can have, in elements of the shape's type: it is what a block can address and
    what the paper calls SRAM; registers hold further tiles, which the paper does not count. Both blocks are rounded
    down to the kernel's choices; a kernel whose smallest block is larger than the rule's cannot express it. Where the
    result breaks a rule (buffers and scores need memory that the paper does not count either), block_n is halved until
    it breaks none. The paper loads a tile when it needs it: num_stages is the kernel's smallest. The kernel's own
    parameters are its default's. The rule is one of the forward alone, over rows of one head: a backward has none, nor
    have queries that fill no tile.
    """
    if shape.direction is not Direction.FORWARD or shape.seqlen_q < SMALLEST_BLOCK:
        return None
    rows, keys = paper_blocks(shape, limits)
    block_m = _round_down(rows, kernel.parameters["block_m"])
    block_n = _round_down(keys, kernel.parameters["block_n"])
    if block_m is None or block_n is None:
        return None
    config = replace(
        kernel.default_config(shape, limits),
        block_m=block_m,
        block_n=block_n,
        num_warps=NUM_WARPS,
        num_stages=min(kernel.parameters["num_stages"]),
    )
    while kernel.omissions(config, shape, limits):
        if config.block_n <= SMALLEST_BLOCK:
            return None
        config = replace(config, block_n=config.block_n // 2)
    return config


def first_paper_config(
    kernels: Iterable[AttentionKernel], shape: AttentionShape, limits: ComputeLimits
) -> KernelConfig | None:
    """Return the paper's config for the first kernel that can express it; None where none can."""
    configs = (paper_config(kernel, shape, limits) for kernel in kernels)
    return next((config for config in configs if config is not None), None)


def _round_down(rows: int, choices: tuple[int, ...]) -> int | None:
    """Return the largest choice that is not above `rows`; None where all are."""
    return max((choice for choice in choices if SMALLEST_BLOCK <= choice <= rows), default=None)

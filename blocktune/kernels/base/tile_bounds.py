"""Bounds of what the tiles of a forward take where the compiler decides: shared memory at most, and tensor memory.

Read off the allocations of Triton 3.6 (notes/models/shared_memory.md). Widths are the padded columns of Q and K, and of
V.
"""

from blocktune.kernels.values.config import KernelConfig

FLOAT32_BYTES = 4
BARRIER_BYTES = 8
MOST_SCRATCH_BYTES = 8192
"""With tcgen05, of barriers, of what aligns a tile after them, and of sums over warps that share rows."""
TENSOR_MEMORY_ROWS, TENSOR_MEMORY_UNIT = 128, 32
"""Rows of a column, and the columns that are allocated at once."""


def forward_columns(config: KernelConfig, widths: tuple[int, int], element_bytes: int) -> int:
    """Return the columns of tensor memory that a forward takes at least: scores and output, of float32 for each of
    three products, and P, or there Q or P, as an operand. Two tiles of 64 rows may lie below each other."""
    n, (width, width_v) = config.block_n, widths
    split = element_bytes == FLOAT32_BYTES
    columns = 3 * (n + width_v) + max(n, width) if split else n + n // 2 + width_v
    return columns * config.block_m // TENSOR_MEMORY_ROWS


def most_forward_columns(config: KernelConfig, widths: tuple[int, int], element_bytes: int) -> int:
    """Return the columns of tensor memory that a forward takes at most. Of three float32 outputs of 64 rows one lies
    below another, and of the scores as a rule."""
    if config.block_m >= TENSOR_MEMORY_ROWS:
        return forward_columns(config, widths, element_bytes)
    if element_bytes != FLOAT32_BYTES:
        return 2 * forward_columns(config, widths, element_bytes)
    n, (width, width_v) = config.block_n, widths
    return 3 * n + 2 * width_v + max(n, width) + TENSOR_MEMORY_UNIT

"""Bounds of what the tiles of a forward take where the compiler decides: shared memory at most, and tensor memory.

Read off the allocations of Triton 3.6 (notes/models/shared_memory.md). Widths are the padded columns of Q and K, and of
V.
"""

from blocktune.kernels.hardware.limits import MatrixUnit
from blocktune.kernels.values.config import KernelConfig

FLOAT32_BYTES = 4
BARRIER_BYTES = 8
MOST_SCRATCH_BYTES = 8192
"""With tcgen05, of barriers, of what aligns a tile after them, and of sums over warps that share rows."""
TENSOR_MEMORY_ROWS, TENSOR_MEMORY_UNIT = 128, 32
"""Rows of a column, and the columns that are allocated at once."""


def most_forward_bytes(
    least_bytes: int, config: KernelConfig, widths: tuple[int, int], element_bytes: int, unit: MatrixUnit
) -> int:
    """Return an upper bound of the shared memory of a forward whose tiles take `least_bytes`.

    Barriers and tiles that change their layout come on top: with `mma` and one stage K, which otherwise changes piece
    by piece; and in float32 the output, when nothing else is there any more. The bound holds for one TF32 product, too.
    """
    split = element_bytes == FLOAT32_BYTES
    if unit == "none":  # the rows' factors change their layout next to Q, P and V
        a_row = widths[0] + config.block_n + 1
        return max(least_bytes, (config.block_m * a_row + config.block_n * widths[1]) * FLOAT32_BYTES * split)
    k_bytes, v_bytes = (config.block_n * width * element_bytes for width in widths)
    if unit == "tcgen05":  # where TF32 is allowed float32 products read Q and every buffer as 16-bit ones do
        one_product = config.block_m * widths[0] * element_bytes + k_bytes + v_bytes
        ahead = config.parameters.get("schedule", 0) != 0 and not split  # least_bytes leaves Q or the buffers out
        whole = (least_bytes + config.block_m * widths[0] * element_bytes) if ahead else least_bytes
        return whole + one_product * split + 2 * MOST_SCRATCH_BYTES + 1024
    if unit == "wgmma":
        return least_bytes
    whole_k = max(0, k_bytes - v_bytes) + 2 * BARRIER_BYTES if config.num_stages == 1 else 0
    leaving = config.block_m * widths[1] * FLOAT32_BYTES * split
    return max(least_bytes + whole_k, leaving)


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

"""The shared memory that pages of a cache take in a loop over tiles of keys."""

from blocktune.kernels.base.flash_kernel import FLOAT32_BYTES, operand_widths, product_unit
from blocktune.kernels.hardware.limits import WARP_SIZE, ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape

ADDRESS_BYTES = 8


def looked_up_bytes(config: KernelConfig, shape: AttentionShape) -> int:
    """Return the bytes of buffers with the pages that keys are in, one a tile or one a key, and with the scales of
    tokens."""
    features, n = shape.features, config.block_n
    pages = (n if n > features.page_size else 1) * (features.page_size > 0)
    return (config.num_stages - 1) * (pages + 2 * n * features.token_scales) * FLOAT32_BYTES


def more_pages_bytes(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the bytes of pages that may come on top, where a tile has several: a second buffer, if rows of keys and
    of values are of different widths and fewer than threads, or what takes addresses to other threads where nothing
    else is exchanged."""
    copied = config.num_stages > 1 and limits.mma != "none"
    if not copied or not 0 < shape.features.page_size < config.block_n:
        return 0
    width, width_v = operand_widths(shape)
    if width != width_v and config.block_n < WARP_SIZE * config.num_warps:
        return (config.num_stages - 1) * config.block_n * FLOAT32_BYTES
    alone = product_unit(config, limits) == "mma" and config.block_m >= width_v
    return config.block_n * ADDRESS_BYTES * alone

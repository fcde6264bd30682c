"""Shared memory of decoding over an 8-bit cache, as Triton 3.6 allocates it.

Keys and values are of 8 bits until they are in registers, a thread moving pairs of them. `wgmma` and `tcgen05` read
keys, and each half of the columns of values, of 16 bits from shared memory.
"""

from blocktune.kernels.base.flash_kernel import FLOAT32_BYTES, looked_up_bytes, operand_widths, product_unit
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.layouts.exchange import exchange_bytes
from blocktune.kernels.layouts.forward_tiles import (
    BARRIER_BYTES,
    LEAST_COPY_BYTES,
    PRODUCTS_BARRIERS_BYTES,
    VECTOR_BYTES,
)
from blocktune.kernels.layouts.register_layouts import WARP_LANES, TileSize, loaded, products_layout, turned_operand
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import CacheType
from blocktune.kernels.values.shape import AttentionShape

PAIR_BYTES = 2
"""Of two neighbouring numbers, and of one that is converted."""
NARROWEST = 16
"""Columns of V."""
KEY_VECTOR_BYTES = VECTOR_BYTES // 2, VECTOR_BYTES
"""Of keys that a thread loads at a time: which of these depends on the head dimension."""


def cached_bytes(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the bytes of a block."""
    width, _ = operand_widths(shape)
    queries = config.block_m * width * shape.element_bytes + looked_up_bytes(config, shape)
    loop = _mma_bytes if product_unit(config, limits) == "mma" else _whole_bytes
    return max(queries + loop(config, shape, limits), leaving_bytes(config, shape, limits))


def exchanged_bytes(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the bytes of P where warps exchange it: each of the two products with values has half of the columns."""
    exchanged = product_unit(config, limits) == "mma" and _by_columns(config, shape)
    return config.block_m * config.block_n * shape.element_bytes * exchanged


def _by_columns(config: KernelConfig, shape: AttentionShape) -> bool:
    return config.block_m < operand_widths(shape)[1] // 2


def _ahead_bytes(config: KernelConfig, shape: AttentionShape) -> tuple[int, int]:
    """Return the buffers of K and of V that loads fill ahead: none where a thread would copy too little, nor of the
    narrowest V where a thread has one row, which it can load at once when it is needed."""
    ahead, threads = (config.num_stages - 1) * config.block_n, config.num_warps * WARP_LANES
    keys, values = (
        ahead * columns * (config.block_n * columns >= LEAST_COPY_BYTES * threads) for columns in operand_widths(shape)
    )
    alone = operand_widths(shape)[1] == NARROWEST and config.block_n == threads
    return keys, 0 if alone else values


def _mma_bytes(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the buffers that loads fill ahead next to P; of one stage K on its way to registers, V and P in turns."""
    width, width_v = operand_widths(shape)
    probabilities, n = exchanged_bytes(config, shape, limits), config.block_n
    keys, values = _ahead_bytes(config, shape)
    if keys:
        return keys + (values or _late_bytes(config, shape)) + probabilities
    size = TileSize(n, width // PAIR_BYTES)
    came = (loaded(size, vector_bytes // PAIR_BYTES, config.num_warps) for vector_bytes in KEY_VECTOR_BYTES)
    wanted = turned_operand(size, config.num_warps, PAIR_BYTES, by_columns=_by_columns(config, shape))
    on_their_way = max(exchange_bytes(layout, wanted, 8 * PAIR_BYTES, limits.cc) for layout in came)
    return max(on_their_way, n * width_v, probabilities)


def _late_bytes(config: KernelConfig, shape: AttentionShape) -> int:
    """Return the bytes of V that was not loaded ahead: both halves of 16 bits, or its numbers of 8 bits."""
    converted = PAIR_BYTES if shape.features.kv is CacheType.E4M3 else 1
    return config.block_n * operand_widths(shape)[1] * converted


def _whole_bytes(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the buffers that loads fill ahead, and the tiles that products read. A half of the narrowest V has too few
    columns for `tcgen05`: `mma` multiplies it, and P changes its layout."""
    width, width_v = operand_widths(shape)
    buffers = sum(ahead := _ahead_bytes(config, shape))
    keys, values = (config.block_n * columns * PAIR_BYTES for columns in (width, width_v))
    if product_unit(config, limits) == "wgmma":
        return buffers + max(keys, values)
    if width_v == NARROWEST:
        probabilities = config.block_m * config.block_n * shape.element_bytes
        late = values if ahead[0] and not ahead[1] else 0
        return buffers + max(keys + BARRIER_BYTES, probabilities) + late
    if config.num_stages == 1:
        return max(keys, values) + BARRIER_BYTES
    return buffers + keys + values + PRODUCTS_BARRIERS_BYTES


def leaving_bytes(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the bytes through which the output, joined of its halves, changes its layout; a share's is float32."""
    element_bytes = FLOAT32_BYTES if config.parameters["splits"] > 1 else shape.element_bytes
    columns, num_warps, unit = operand_widths(shape)[1], config.num_warps, product_unit(config, limits)
    half = TileSize(config.block_m, columns // 2)
    made = products_layout(unit, half, num_warps, by_columns=_by_columns(config, shape)).joined
    stored = loaded(TileSize(config.block_m, columns), VECTOR_BYTES // element_bytes, num_warps)
    return exchange_bytes(made, stored, 8 * element_bytes, limits.cc)

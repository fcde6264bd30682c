"""Shared memory of decoding over an 8-bit cache, as Triton 3.6 allocates it.

Keys and values are of 8 bits until they are in registers, a thread moving pairs of them. `wgmma` and `tcgen05` read
keys, and each half of the columns of values, of 16 bits from shared memory.
"""

from blocktune.kernels.base.flash_kernel import FLOAT32_BYTES, operand_widths, product_unit
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.layouts.exchange import exchange_bytes
from blocktune.kernels.layouts.forward_tiles import BARRIER_BYTES, PRODUCTS_BARRIERS_BYTES, VECTOR_BYTES
from blocktune.kernels.layouts.register_layouts import TileSize, loaded, products_layout, turned_operand
from blocktune.kernels.portable.decode.kernel import looked_up_bytes
from blocktune.kernels.values.config import KernelConfig
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


def _mma_bytes(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the buffers that loads fill ahead next to P; of one stage K on its way to registers, V and P in turns. A
    thread would copy too little of the narrowest V, which comes when it is needed."""
    width, width_v = operand_widths(shape)
    probabilities, n = exchanged_bytes(config, shape, limits), config.block_n
    if config.num_stages > 1:
        ahead = (config.num_stages - 1) * n
        return ahead * width + (n if width_v == NARROWEST else ahead) * width_v + probabilities
    size = TileSize(n, width // PAIR_BYTES)
    came = (loaded(size, vector_bytes // PAIR_BYTES, config.num_warps) for vector_bytes in KEY_VECTOR_BYTES)
    wanted = turned_operand(size, config.num_warps, PAIR_BYTES, by_columns=_by_columns(config, shape))
    keys = max(exchange_bytes(layout, wanted, 8 * PAIR_BYTES, limits.cc) for layout in came)
    return max(keys, n * width_v, probabilities)


def _whole_bytes(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the buffers that loads fill ahead, and the tiles that products read."""
    width, width_v = operand_widths(shape)
    buffers = (config.num_stages - 1) * config.block_n * (width + width_v)
    keys, values = (config.block_n * columns * PAIR_BYTES for columns in (width, width_v))
    if product_unit(config, limits) == "wgmma":
        return buffers + max(keys, values)
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

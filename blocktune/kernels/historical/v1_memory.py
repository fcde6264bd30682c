"""Shared memory of FlashAttention's first algorithm (`kernels/historical/v1.py`), as Triton 3.6 allocates it."""

from blocktune.kernels.base.flash_kernel import FLOAT32_BYTES, padded_width, product_unit, tf32_tiles
from blocktune.kernels.base.precision import is_one_product
from blocktune.kernels.hardware.limits import ComputeLimits, MatrixUnit
from blocktune.kernels.historical.base import is_aligned
from blocktune.kernels.layouts.exchange import exchange_bytes
from blocktune.kernels.layouts.forward_tiles import BARRIER_BYTES, TILE_ALIGNMENT_BYTES, VECTOR_BYTES
from blocktune.kernels.layouts.register_layouts import (
    RegisterLayout,
    TileSize,
    accumulated,
    accumulated_by_group,
    in_tensor_memory,
    loaded,
    summed,
)
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape


def round_trip_bytes(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the bytes of a block: keys and values, and the largest of what comes and goes while they stay.

    Plain multiply-adds take all tiles as float32. Keys and values of float32 are there twice, as TF32 numbers and as
    what these leave.
    """
    plain = limits.mma == "none"
    element_bytes = FLOAT32_BYTES if plain else shape.element_bytes
    keys = _keys_bytes(config, shape, element_bytes) * (1 if plain else tf32_tiles(shape))
    return keys + max(_operand_bytes(config, shape, limits), _output_bytes(config, shape, limits))


def most_round_trip_bytes(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the bytes at most: with tensor memory a tile may be moved for its alignment, and one product of TF32
    numbers reads queries from shared memory."""
    taken, unit = round_trip_bytes(config, shape, limits), product_unit(config, limits)
    if unit == "none" and shape.element_bytes == FLOAT32_BYTES:  # the rows' factors change their layout next to P
        return taken + config.block_m * FLOAT32_BYTES
    if unit != "tcgen05":
        return taken
    if shape.element_bytes == FLOAT32_BYTES:
        return max(taken, one_product_bytes(config, shape, limits)) if is_one_product(shape.dtype) else taken
    moved = _operand_bytes(config, shape, limits) > _output_bytes(config, shape, limits)
    return taken + (TILE_ALIGNMENT_BYTES - BARRIER_BYTES) * moved


def one_product_bytes(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the bytes where float32 products are of TF32 numbers alone and tensor memory holds no operand."""
    queries = config.block_m * padded_width(shape.head_dim) * shape.element_bytes
    return _keys_bytes(config, shape, shape.element_bytes) + max(queries, _output_bytes(config, shape, limits))


def _keys_bytes(config: KernelConfig, shape: AttentionShape, element_bytes: int) -> int:
    return config.block_n * (padded_width(shape.head_dim) + padded_width(shape.head_dim_v)) * element_bytes


def _operand_bytes(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the bytes of the queries, or later of the probabilities where warps exchange them."""
    unit, element_bytes, m, n = product_unit(config, limits), shape.element_bytes, config.block_m, config.block_n
    queries, probabilities = m * padded_width(shape.head_dim), m * n
    if unit == "none":  # sums of float32 probabilities are found while these are there
        sums = m * _warps_along(n, config) if element_bytes == FLOAT32_BYTES else 0
        return FLOAT32_BYTES * max(queries, probabilities + sums)
    if unit == "tcgen05" and element_bytes == FLOAT32_BYTES:  # they are on their way to tensor memory
        size = TileSize(m, padded_width(shape.head_dim))
        came = loaded(size, _vector(size.columns, shape, element_bytes), config.num_warps)
        return exchange_bytes(came, in_tensor_memory(size, config.num_warps), 8 * FLOAT32_BYTES, limits.cc)
    if unit == "tcgen05":
        return queries * element_bytes + BARRIER_BYTES
    exchanged = probabilities * tf32_tiles(shape) if unit == "mma" and m < padded_width(shape.head_dim_v) else 0
    return element_bytes * max(queries, exchanged)


def _warps_along(columns: int, config: KernelConfig) -> int:
    """Return the warps of plain multiply-adds that find the sum of a row together; 0 if there is only one."""
    layout = summed(TileSize(config.block_m, columns), config.num_warps)
    warps = 1 << sum(0 < place < columns for place in layout.warps)
    return warps if warps > 1 else 0


def _output_bytes(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the bytes through which the float32 output comes from device memory and goes back to it."""
    size, num_warps = TileSize(config.block_m, padded_width(shape.head_dim_v)), config.num_warps
    came = loaded(size, _vector(size.columns, shape, shape.element_bytes), num_warps)
    goes = loaded(size, VECTOR_BYTES // FLOAT32_BYTES if is_aligned(shape.head_dim_v) else 1, num_warps)
    first, last = _products(size, num_warps, product_unit(config, limits))
    bits = 8 * FLOAT32_BYTES
    return max(exchange_bytes(came, first, bits, limits.cc), exchange_bytes(last, goes, bits, limits.cc))


def _vector(columns: int, shape: AttentionShape, element_bytes: int) -> int:
    """Return the elements that a thread loads at a time of tiles of so wide rows: one, where Triton knows of none how
    they are aligned."""
    heads = (head for head in (shape.head_dim, shape.head_dim_v) if padded_width(head) == columns)
    return VECTOR_BYTES // element_bytes if any(is_aligned(head) for head in heads) else 1


def _products(size: TileSize, num_warps: int, unit: MatrixUnit) -> tuple[RegisterLayout, RegisterLayout]:
    """Return the layouts of the output before and after the product with the values."""
    if unit == "wgmma":
        return accumulated(size, num_warps, by_columns=False), accumulated_by_group(size, num_warps)
    layout = {
        "none": lambda: summed(size, num_warps),
        "tcgen05": lambda: in_tensor_memory(size, num_warps),
        "mma": lambda: accumulated(size, num_warps, by_columns=size.rows < size.columns),
    }[unit]()
    return layout, layout

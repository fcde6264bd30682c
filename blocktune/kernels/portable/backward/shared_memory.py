"""Shared and tensor memory of a backward pass, read off the allocations of Triton 3.6."""

from dataclasses import replace

from blocktune.kernels.base.feature_arguments import mask_element_bytes
from blocktune.kernels.base.flash_kernel import FLOAT32_BYTES, WARPGROUP_ROWS, padded_width
from blocktune.kernels.base.tile_bounds import TENSOR_MEMORY_ROWS, TENSOR_MEMORY_UNIT
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.layouts.exchange import exchange_bytes
from blocktune.kernels.layouts.forward_tiles import VECTOR_BYTES
from blocktune.kernels.layouts.pass_tiles import PassTiles
from blocktune.kernels.layouts.register_layouts import TileSize, in_tensor_memory, loaded
from blocktune.kernels.portable.forward.arguments import Options
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape


def key_pass(constants: Options, num_warps: int, shape: AttentionShape, limits: ComputeLimits) -> PassTiles:
    """Return the tiles of a pass with these constants whose programs own BLOCK_N keys."""
    queries = query_pass(constants, num_warps, shape, limits)
    return replace(queries, owned=queries.walked, walked=queries.owned, over_keys=True)


def query_pass(constants: Options, num_warps: int, shape: AttentionShape, limits: ComputeLimits) -> PassTiles:
    """Return the tiles of a pass whose programs own BLOCK_M queries."""
    element_bytes = mask_element_bytes(shape)
    return PassTiles(
        owned=constants.BLOCK_M,
        walked=constants.BLOCK_N,
        over_keys=False,
        width=constants.WIDTH,
        width_v=constants.WIDTH_V,
        element_bytes=shape.element_bytes,
        num_warps=num_warps,
        num_stages=constants.STAGES,
        unit=limits.mma,
        cc=limits.cc,
        mask_element_bytes=element_bytes,
        mask_copied=element_bytes == FLOAT32_BYTES or not constants.RAGGED,
        dropout=shape.features.dropout,
        softcap=shape.features.softcap,
    )


def statistics_bytes(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the bytes of the launch that finds the row maxima of float32 scores: two TF32 tiles of the queries, and
    keys, or what these take on their way to tensor memory. 0 for other types, which have none."""
    if shape.dtype != "float32" or limits.mma == "none":
        return 0
    width, m, n = padded_width(shape.head_dim), config.block_m, config.block_n
    keys = n * width * FLOAT32_BYTES
    if limits.mma == "tcgen05" and n >= WARPGROUP_ROWS:
        came = loaded(TileSize(n, width), VECTOR_BYTES // FLOAT32_BYTES, config.num_warps)
        wanted = in_tensor_memory(TileSize(n, width), config.num_warps)
        keys = exchange_bytes(came, wanted, 8 * FLOAT32_BYTES, limits.cc)
    return 2 * m * width * FLOAT32_BYTES + keys


def most_pass_columns(owned: int, walked: int, summed: int, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return at most how many columns of tensor memory a float32 pass takes that sums up `summed` columns a row: two
    tiles of scores and the sums for each of three products, and an operand; of 64 rows a third lies below the rest."""
    if limits.mma != "tcgen05" or owned < WARPGROUP_ROWS or shape.dtype != "float32":
        return 0
    products = 3 if owned >= TENSOR_MEMORY_ROWS else 2
    return products * (2 * walked + summed) + max(_widest(shape), walked) + TENSOR_MEMORY_UNIT


def least_pass_columns(owned: int, walked: int, summed: int, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return at least how many: the scores and sums alone, if two tiles of 64 rows lie below each other."""
    if limits.mma != "tcgen05" or owned < WARPGROUP_ROWS or shape.dtype != "float32":
        return 0
    return 3 * (2 * walked + summed) * owned // TENSOR_MEMORY_ROWS


def _widest(shape: AttentionShape) -> int:
    return max(padded_width(shape.head_dim), padded_width(shape.head_dim_v))

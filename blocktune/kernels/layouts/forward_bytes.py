"""Shared memory of a FlashAttention-2 forward, as Triton 3.6 allocates it (notes/models/shared_memory.md)."""

from functools import cache

from blocktune.kernels.layouts.exchange import exchange_bytes
from blocktune.kernels.layouts.forward_tiles import (
    BARRIER_BYTES,
    EXCHANGED_AT_ONCE_BYTES,
    FACTOR_BYTES,
    FLOAT32_BYTES,
    GROUP_WARPS,
    LOCAL_BARRIERS_BYTES,
    PRODUCTS_BARRIERS_BYTES,
    TENSOR_MEMORY_ROWS,
    TILE_ALIGNMENT_BYTES,
    VECTOR_BYTES,
    ForwardTiles,
)
from blocktune.kernels.layouts.register_layouts import (
    WARP_LANES,
    RegisterLayout,
    TileSize,
    loaded,
    products_layout,
    scores_layout,
    turned_operand,
)


@cache
def forward_bytes(tiles: ForwardTiles) -> int:
    """Return the bytes of a block: of its loops, or of the output that changes its layout after them."""
    return max(loop_bytes(tiles), output_bytes(tiles, tiles.element_bytes))


def loop_bytes(tiles: ForwardTiles) -> int:
    """Return the bytes of a block's loops."""
    if tiles.unit == "none":
        return _plain_bytes(tiles)
    return {"mma": _mma_bytes, "wgmma": _group_bytes, "tcgen05": _tensor_memory_bytes}[tiles.unit](tiles)


def most_forward_bytes(tiles: ForwardTiles) -> int:
    """Return an upper bound of `forward_bytes`: with what aligns tiles, barriers, and the rows' factors."""
    return forward_bytes(tiles) + uncertain_bytes(tiles)


def uncertain_bytes(tiles: ForwardTiles) -> int:
    """Return the bytes of what aligns tiles, of barriers, and of the rows' factors, which may be there or not."""
    if tiles.unit == "none":
        return _plain_bytes(tiles, factor_bytes=tiles.block_m * FLOAT32_BYTES) - _plain_bytes(tiles)
    if tiles.unit == "tcgen05":
        read = tiles.q_bytes + tiles.k_bytes + tiles.v_bytes if tiles.one_product else 0
        return TILE_ALIGNMENT_BYTES + read
    return 2 * BARRIER_BYTES * (tiles.unit == "mma" and tiles.num_stages == 1)


def _plain_bytes(tiles: ForwardTiles, factor_bytes: int = 0) -> int:
    """Return the shared memory of plain multiply-adds: operands pass through it as float32, Q for the whole loop.

    What else is there at one time is K or, after it, P and V. P in float32 needs no conversion and stays there while V
    comes; 16-bit ones are converted one after the other. Where a row of V is as wide as all threads load at a time,
    they have what they multiply.

    Args:
        factor_bytes: of the rows' factors next to a P that stays.
    """
    ratio = FLOAT32_BYTES // tiles.element_bytes
    q, k, p, v = (ratio * size for size in (tiles.q_bytes, tiles.k_bytes, tiles.p_bytes, tiles.v_bytes))
    loaded_columns = VECTOR_BYTES // tiles.element_bytes * WARP_LANES * tiles.num_warps
    v *= tiles.width_v < loaded_columns
    return q + (max(k, p + v + factor_bytes) if tiles.split else max(k, p, v))


def _mma_bytes(tiles: ForwardTiles) -> int:
    """Return Q, the buffers that loads fill, and K on its way to registers or later V next to P."""
    beside = not tiles.split or tiles.num_stages > 1  # a float32 P is there before V is
    exchanged = tiles.by_columns or (tiles.dropout and tiles.mask_element_bytes == 1)
    later = tiles.p_bytes * (1 + tiles.split) if exchanged and beside else 0
    later += tiles.v_bytes if tiles.v_depth == 0 else 0
    first = 0 if tiles.k_depth else keys_bytes(tiles)
    buffers = tiles.k_depth * tiles.k_bytes + tiles.v_depth * tiles.v_bytes
    held = tiles.q_bytes * (1 + tiles.split) + buffers + tiles.mask_buffer_bytes
    return held + max(first, later, scores_bytes(tiles)) + tiles.barrier_bytes


def keys_bytes(tiles: ForwardTiles) -> int:
    """Return the bytes of K on its way to the registers of `mma`, where no load has filled a buffer."""
    if tiles.keys_whole:
        return tiles.k_bytes
    size, num_warps = TileSize(tiles.block_n, tiles.width), tiles.num_warps
    came = loaded(size, tiles.vector(aligned=tiles.k_aligned), num_warps)
    wanted = turned_operand(size, num_warps, tiles.element_bytes, by_columns=tiles.by_columns)
    return exchange_bytes(came, wanted, 8 * tiles.element_bytes, tiles.cc)


def scores_bytes(tiles: ForwardTiles) -> int:
    """Return the bytes through which scores and a mask's tile meet in one layout, if loads do not fill a buffer with
    it, or the words of dropout become pairs: one byte a score."""
    kept = tiles.block_m * tiles.block_n * (tiles.dropout and tiles.unit != "tcgen05")
    if not tiles.mask_element_bytes or tiles.mask_buffer_bytes:
        return kept
    read, scores = _mask_layouts(tiles)
    of_mask = exchange_bytes(read, scores, 8 * tiles.mask_element_bytes, tiles.cc)
    return max(kept, of_mask, exchange_bytes(scores, read, 8 * FLOAT32_BYTES, tiles.cc))


def _mask_layouts(tiles: ForwardTiles) -> tuple[RegisterLayout, RegisterLayout]:
    """Return the layouts of a mask's tile as it is loaded, and of scores."""
    size, vector = TileSize(tiles.block_m, tiles.block_n), VECTOR_BYTES // tiles.mask_element_bytes
    scores = scores_layout(tiles.unit, size, tiles.num_warps, by_columns=tiles.by_columns)
    return loaded(size, vector, tiles.num_warps), scores


def _group_bytes(tiles: ForwardTiles) -> int:
    """Return the bytes with `wgmma`, which reads buffers; of float32 the TF32 numbers of one at a time."""
    if tiles.split:
        buffers = (tiles.num_stages - 1) * (tiles.k_bytes + tiles.v_bytes) + tiles.mask_buffer_bytes
        needed = max(2 * tiles.k_bytes, 2 * tiles.v_bytes, scores_bytes(tiles))
        return 2 * tiles.q_bytes + buffers + needed + tiles.barrier_bytes
    exchanged = tiles.p_bytes if tiles.ahead and tiles.shares_rows else 0
    if tiles.num_stages == 1 and exchanged:  # P goes through shared memory before V comes
        return tiles.q_bytes + tiles.k_bytes + max(tiles.v_bytes + tiles.barrier_bytes, exchanged)
    return tiles.q_bytes + _buffer_bytes(tiles) + exchanged + tiles.barrier_bytes


def _buffer_bytes(tiles: ForwardTiles) -> int:
    """Return the bytes of K and V where products read their buffers: one that is not filled ahead is there when it is
    needed."""
    if tiles.ahead:
        return tiles.num_stages * (tiles.k_bytes + tiles.v_bytes)
    needed = max(0 if tiles.k_depth else tiles.k_bytes, 0 if tiles.v_depth else tiles.v_bytes, scores_bytes(tiles))
    return tiles.k_depth * tiles.k_bytes + tiles.v_depth * tiles.v_bytes + tiles.mask_buffer_bytes + needed


def _tensor_memory_bytes(tiles: ForwardTiles) -> int:
    """Return the bytes with `tcgen05`, whose products end at barriers."""
    if tiles.split:
        return _split_tensor_memory_bytes(tiles)
    barriers, exchanged = max(tiles.barrier_bytes, BARRIER_BYTES), _exchanged_in_tensor_memory(tiles)
    if tiles.num_stages > 1 and not tiles.ahead:
        return tiles.q_bytes + _staged_bytes(tiles)
    if tiles.num_stages > 1:  # the first K is gone before the last V comes
        return tiles.q_bytes + _buffer_bytes(tiles) - tiles.v_bytes + barriers + exchanged
    if tiles.ahead:
        return tiles.q_bytes + tiles.k_bytes + tiles.v_bytes + barriers
    later = tiles.v_bytes + max(barriers, exchanged)
    return tiles.q_bytes + max(tiles.k_bytes + barriers, later, scores_bytes(tiles))


def _split_tensor_memory_bytes(tiles: ForwardTiles) -> int:
    """Return the bytes of float32, whose queries are in tensor memory."""
    buffers = (tiles.num_stages - 1) * (tiles.k_bytes + tiles.v_bytes) + tiles.mask_buffer_bytes
    needed = 2 * max(tiles.k_bytes, tiles.v_bytes) + max(tiles.barrier_bytes, BARRIER_BYTES)
    return buffers + max(needed, scores_bytes(tiles))


def _staged_bytes(tiles: ForwardTiles) -> int:
    """Return the bytes besides Q of several stages in order, where the product with V goes on while the next V
    comes."""
    buffers = max(tiles.k_depth, 1) * tiles.k_bytes + max(tiles.v_depth, 2) * tiles.v_bytes + tiles.mask_buffer_bytes
    barriers = PRODUCTS_BARRIERS_BYTES if tiles.k_depth or tiles.v_depth else LOCAL_BARRIERS_BYTES
    shared_rows = tiles.k_depth and tiles.num_warps > GROUP_WARPS and tiles.block_m <= TENSOR_MEMORY_ROWS
    return buffers + tiles.barrier_bytes + barriers + max(FACTOR_BYTES if shared_rows else 0, scores_bytes(tiles))


def _exchanged_in_tensor_memory(tiles: ForwardTiles) -> int:
    """Return the bytes through which P goes to tensor memory from the layout of a mask, or from 8 warps that share 128
    rows."""
    if tiles.mask_element_bytes and not tiles.mask_buffer_bytes:
        return exchange_bytes(*_mask_layouts(tiles), 8 * tiles.element_bytes, tiles.cc)
    if tiles.num_warps <= GROUP_WARPS or tiles.block_m != TENSOR_MEMORY_ROWS:
        return 0
    return min(tiles.p_bytes, EXCHANGED_AT_ONCE_BYTES)


def output_bytes(tiles: ForwardTiles, element_bytes: int) -> int:
    """Return the bytes through which an output of this type changes its layout when nothing else is there any more."""
    size, num_warps = TileSize(tiles.block_m, tiles.width_v), tiles.num_warps
    stored = loaded(size, VECTOR_BYTES // element_bytes if tiles.v_aligned else 1, num_warps)
    return exchange_bytes(_products(tiles, size), stored, 8 * element_bytes, tiles.cc)


def _products(tiles: ForwardTiles, size: TileSize) -> RegisterLayout:
    return products_layout(tiles.unit, size, tiles.num_warps, by_columns=tiles.by_columns)

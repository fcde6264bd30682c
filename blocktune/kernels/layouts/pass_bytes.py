"""Shared memory of a pass of a backward, as Triton 3.6 allocates it (notes/models/shared_memory.md)."""

from dataclasses import replace
from functools import cache

from blocktune.kernels.layouts.forward_tiles import BARRIER_BYTES, FLOAT32_BYTES, TILE_ALIGNMENT_BYTES
from blocktune.kernels.layouts.pass_tiles import PassTiles, mask_bytes, mask_read_bytes, sums_bytes, turned_bytes
from blocktune.kernels.layouts.split_pass_bytes import split_pass_bytes

KEY_BARRIERS_BYTES, QUERY_BARRIERS_BYTES = 64, 48
"""Of the products of `tcgen05` in a pass over keys and in one over queries that load ahead."""


@cache
def pass_bytes(tiles: PassTiles) -> int:
    """Return the bytes of a block."""
    if tiles.unit == "none":
        return _plain_bytes(tiles)
    if tiles.element_bytes == FLOAT32_BYTES:
        return split_pass_bytes(tiles)
    loop = _loop_bytes(tiles)
    if tiles.one_more_loop:
        loop = max(loop, _loop_bytes(replace(tiles, num_stages=1)))
    return tiles.owned_bytes + tiles.keys_bytes * keys_again(tiles) + loop


def most_pass_bytes(tiles: PassTiles) -> int:
    """Return an upper bound of `pass_bytes`: a tile that is read from shared memory may be moved for its alignment."""
    return pass_bytes(tiles) + TILE_ALIGNMENT_BYTES * (tiles.unit in ("wgmma", "tcgen05"))


def _plain_bytes(tiles: PassTiles) -> int:
    """Return the bytes with plain multiply-adds: operands pass through shared memory as float32, one after the other;
    scores of float32 stay there while the next operand comes."""
    ratio = FLOAT32_BYTES // tiles.element_bytes
    first, second, scores = (ratio * size for size in (tiles.first_bytes, tiles.second_bytes, tiles.scores_bytes))
    beside, sums = max(mask_bytes(tiles), tiles.dropout_bytes), sums_bytes(tiles)
    if ratio == 1:
        later = second + scores if tiles.over_keys else max(second, scores)
        return tiles.owned_bytes + max(first + max(later, beside), sums)
    return ratio * tiles.owned_bytes + max(first, second, scores, beside, sums)


def _loop_bytes(tiles: PassTiles) -> int:
    """Return the bytes of what comes and goes in the loop over walked tiles of 16 bits."""
    if tiles.products_unit == "mma":
        return _mma_bytes(tiles)
    return _group_bytes(tiles) if tiles.products_unit == "wgmma" else _tensor_memory_bytes(tiles)


def keys_again(tiles: PassTiles) -> bool:
    """Return whether K is there in a second layout: of float32, or where the share of dq is a product of another
    instruction than the others."""
    split = tiles.element_bytes == FLOAT32_BYTES and tiles.unit != "none"
    return tiles.adds and (split or (tiles.sums_unit == "mma") is not (tiles.products_unit == "mma"))


def _mma_bytes(tiles: PassTiles) -> int:
    """Return the bytes with `mma`: walked rows on their way to registers, or the buffers that loads fill, next to P or
    ds where warps exchange them."""
    sums, beside = sums_bytes(tiles), max(mask_bytes(tiles), tiles.dropout_bytes)
    exchanged = tiles.scores_bytes * (1 + _keeps_two(tiles)) if tiles.exchanges or tiles.adds else 0
    if tiles.num_stages > 1 and tiles.copies:
        return tiles.buffer_bytes + sums + max(exchanged, beside)
    if tiles.num_stages > 1:
        return tiles.buffer_bytes + max(exchanged, beside, sums)
    first, second = (turned_bytes(tiles, columns) for columns in (tiles.width, tiles.width_v))
    if not tiles.over_keys:
        return tiles.first_bytes + max(first, second, exchanged, beside)
    probabilities = tiles.scores_bytes if tiles.exchanges else 0
    both = tiles.second_bytes + max(second, probabilities, tiles.dropout_bytes)
    return max(tiles.first_bytes + max(first, beside, both, exchanged), sums)


def _keeps_two(tiles: PassTiles) -> bool:
    """Return whether ds is in shared memory in two layouts, for dk and for the share of dq."""
    features = tiles.mask_element_bytes == 1 or tiles.dropout
    by_mma = tiles.sums_unit == "mma" and tiles.by_columns and features
    return tiles.adds and (tiles.sums_unit == "tcgen05" or by_mma)


def _group_bytes(tiles: PassTiles) -> int:
    """Return the bytes with `wgmma`, which reads buffers."""
    both, mask, sums = tiles.first_bytes + tiles.second_bytes, mask_bytes(tiles), sums_bytes(tiles)
    exchanged, kept = tiles.scores_bytes * tiles.adds, tiles.dropout_bytes
    if tiles.num_stages == 1:
        late = max(kept if tiles.over_keys else 0, mask if kept else 0)
        narrow = exchanged if tiles.sums_unit == "mma" else 0
        return max(both + late, tiles.first_bytes + max(mask, kept, narrow), exchanged, sums)
    if tiles.copies:
        return tiles.buffer_bytes + both + sums + max(exchanged, mask, kept)
    return tiles.buffer_bytes + both + max(exchanged, mask, kept, sums)


def _tensor_memory_bytes(tiles: PassTiles) -> int:
    """Return the bytes with `tcgen05`: while one tile is multiplied, the next ones come."""
    if tiles.in_turns:
        return _tensor_memory_turns_bytes(tiles)
    sums, exchanged = sums_bytes(tiles), tiles.scores_bytes * tiles.adds
    copied = sums * tiles.copies
    beside = max(mask_bytes(tiles), tiles.dropout_bytes, sums - copied)
    if tiles.adds and tiles.sums_unit == "mma":
        return tiles.buffer_bytes + copied + max(exchanged + BARRIER_BYTES, beside)
    again, barriers = tiles.first_bytes, QUERY_BARRIERS_BYTES
    if tiles.over_keys:
        again, barriers = tiles.first_bytes + tiles.second_bytes, KEY_BARRIERS_BYTES
    both = tiles.first_bytes + tiles.second_bytes + again
    return tiles.buffer_bytes + both + barriers + 2 * copied + max(exchanged, beside)


def _tensor_memory_turns_bytes(tiles: PassTiles) -> int:
    """Return the bytes of one stage, where rows come when they are needed."""
    early = tiles.over_keys and (tiles.mask_element_bytes > 1 or tiles.adds)
    late = max(BARRIER_BYTES, 0 if early else mask_read_bytes(tiles), tiles.dropout_bytes)
    exchanged = tiles.scores_bytes * tiles.adds + BARRIER_BYTES
    first = max(tiles.second_bytes + late, mask_bytes(tiles), exchanged)
    return max(tiles.first_bytes + first, sums_bytes(tiles))

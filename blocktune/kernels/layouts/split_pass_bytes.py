"""Shared memory of a float32 pass of a backward: an operand is the TF32 numbers of a tile and what these leave."""

from blocktune.kernels.layouts.forward_tiles import BARRIER_BYTES
from blocktune.kernels.layouts.pass_tiles import PassTiles, mask_bytes, owned_exchange_bytes, sums_bytes, turned_bytes


def split_pass_bytes(tiles: PassTiles) -> int:
    """Return the bytes of a block whose GPU has tensor cores."""
    if tiles.products_unit != "mma":
        return _group_bytes(tiles)
    beside = max(mask_bytes(tiles), tiles.dropout_bytes, _exchanged_bytes(tiles))
    held = 2 * (tiles.owned_bytes + tiles.keys_bytes) + tiles.values_bytes + tiles.mask_buffer_bytes
    first, second = (turned_bytes(tiles, columns) for columns in (tiles.width, tiles.width_v))
    if tiles.over_keys:
        walking = max(first, tiles.second_bytes + second, tiles.first_bytes, beside)
        return held + _with_sums(tiles, walking)
    buffers, turned = (tiles.num_stages - 1) * tiles.second_bytes, first if tiles.num_stages > 1 else max(first, second)
    return held + buffers + max(tiles.first_bytes, turned, beside)


def _exchanged_bytes(tiles: PassTiles) -> int:
    """Return the bytes of probabilities or ds where `mma` exchanges them."""
    return 2 * tiles.scores_bytes if tiles.exchanges or tiles.adds else 0


def _with_sums(tiles: PassTiles, walking: int) -> int:
    """Return the bytes of a walked tile and of the share of dq, which the copy engine may still hold by then."""
    sums = sums_bytes(tiles)
    return walking + sums if tiles.copies and tiles.num_stages > 1 else max(walking, sums)


def _group_bytes(tiles: PassTiles) -> int:
    """Return the bytes where `wgmma` or `tcgen05` multiplies, of which the latter keeps owned rows in tensor memory."""
    in_memory = tiles.products_unit == "tcgen05"
    exchanged = (1 if tiles.sums_unit == "tcgen05" else 2) * tiles.scores_bytes * tiles.adds
    walking = 2 * max(tiles.first_bytes, tiles.second_bytes) + BARRIER_BYTES * in_memory
    beside = max(walking, exchanged, mask_bytes(tiles), tiles.dropout_bytes)
    held = 2 * (tiles.keys_bytes + (0 if in_memory else tiles.owned_bytes)) + tiles.buffer_bytes
    owned = max(owned_exchange_bytes(tiles, columns) for columns in (tiles.width, tiles.width_v))
    return max(held + _with_sums(tiles, beside), owned)

"""What the warps of heads wider than 128 do between two tiles of keys, in Gluon, however they share the products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from blocktune.kernels.hopper.backward.arguments import Bounds, KeyTile
from blocktune.kernels.hopper.backward.bounds import (
    bounds_of,
    copy_rows_out,
    head_row,
    locate_keys,
    query_range,
    sequence,
    walks_back,
)
from blocktune.kernels.hopper.common.device_functions import as_block

# mypy: disable-error-code="var-annotated"


@gluon.jit
def tile_of_keys(
    tile, key_tiles, sizes, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, OPTIONS: gl.constexpr
):  # fmt: skip
    """The tile of this number."""
    n, batch_head = locate_keys(tile, key_tiles, sizes.head_group, sizes.batch_heads, OPTIONS)
    n0 = n * BLOCK_N
    entry = batch_head // sizes.num_heads_kv
    begin_q, len_q = sequence(sizes.cu_q, entry, sizes.seqlen_q, OPTIONS)
    begin_k, len_k = sequence(sizes.cu_k, entry, sizes.seqlen_k, OPTIONS)
    above, below = bounds_of(sizes.upper, sizes.lower, len_q, len_k, OPTIONS)
    first, low, high, end, _seen = query_range(n0, len_q, len_k, above, below, BLOCK_M, BLOCK_N, OPTIONS)
    return KeyTile(
        n0=n0,
        batch_head=batch_head,
        entry=entry,
        head=batch_head % sizes.num_heads_kv,
        begin_q=begin_q,
        begin_k=begin_k,
        first=first,
        low=low,
        high=high,
        end=end,
        back=walks_back(batch_head, sizes.head_group, sizes.batch_heads, OPTIONS),
        bounds=Bounds(upper=above, lower=below, queries=len_q, keys=len_k),
    )


@gluon.jit
def row_of_head(tile, member, sizes, BLOCK_M: gl.constexpr, OPTIONS: gl.constexpr):
    """Where the query head number `member` of the tile's key head begins in the workspace, in rows."""
    return head_row(
        tile.batch_head, member, sizes.num_heads_kv, sizes.group_size, tile.begin_q, sizes.seqlen_q, sizes.rows,
        BLOCK_M, True, OPTIONS,
    )  # fmt: skip


@gluon.jit
def give_gradient(gradient, desc, tile, key, place, panel: gl.constexpr, OPTIONS: gl.constexpr):
    """Has a panel of dK or dV of 64 keys from `key` on leave from a place in memory that the last but one left from."""
    tma.store_wait(1)
    place.store(gradient.to(place.dtype))
    fence_async_shared()
    copy_rows_out(
        desc, tile.entry, tile.head, key, panel * 64, tile.begin_k, tile.bounds.keys, as_block(desc, place), OPTIONS
    )  # fmt: skip

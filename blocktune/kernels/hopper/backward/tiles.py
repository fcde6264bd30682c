"""Tiles of keys of the Hopper backward, in Gluon: their order, how warps get them, and where their heads lie."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.backward.arguments import KeyTile, Walk
from blocktune.kernels.hopper.backward.bounds import batch_of, key_head_of, query_range, walks_back
from blocktune.kernels.hopper.common.device_functions import locate
from blocktune.kernels.hopper.common.head_rows import HeadRows
from blocktune.kernels.hopper.common.sequences import SequenceBounds, whole_sequence
from blocktune.kernels.hopper.common.slots import publish, receive

# mypy: disable-error-code="var-annotated"


@gluon.jit
def count_key_tiles(sizes, OPTIONS: gl.constexpr):
    """Return how many tiles a head has."""
    if OPTIONS.GENERAL:
        return (sizes.seqlen_k + OPTIONS.BLOCK_N - 1) // OPTIONS.BLOCK_N
    else:
        return sizes.seqlen_k // OPTIONS.BLOCK_N


@gluon.jit
def locate_keys(number, key_tiles, sizes, OPTIONS: gl.constexpr):
    """Return (tile of the head, batch * num_heads_kv + head) of a number. Causal, or in a fixed order of additions,
    tiles of several heads are taken in turns. Those of the first keys come first, which are the longest under a
    diagonal, unless they are the last ones to add."""
    IN_TURNS: gl.constexpr = OPTIONS.CAUSAL or OPTIONS.ORDERED
    n, batch_head = locate(number, key_tiles, sizes.head_group, sizes.batch_heads, IN_TURNS)
    if OPTIONS.BACK or (OPTIONS.CAUSAL and not OPTIONS.ORDERED):
        n = key_tiles - 1 - n
    elif OPTIONS.BOTH_WAYS:
        n = gl.where(walks_back(batch_head, sizes, OPTIONS), key_tiles - 1 - n, n)
    return n, batch_head


@gluon.jit
def sequence_of(batch, tensors, sizes, OPTIONS: gl.constexpr):
    """Return the bounds of the sequence of a batch entry, packed or not. The forwards' `packed_sequence` loads and adds
    in another order, which is another machine code."""
    if OPTIONS.PACKED:
        begin_q = gl.load(tensors.cu_q + batch)
        seqlen_q = gl.load(tensors.cu_q + batch + 1) - begin_q
        begin_k = gl.load(tensors.cu_k + batch)
        seqlen_k = gl.load(tensors.cu_k + batch + 1) - begin_k
        right, left = sizes.right, sizes.left
        if OPTIONS.LOWER_RIGHT:
            right = right + seqlen_k - seqlen_q
            left = left + seqlen_k - seqlen_q
        return SequenceBounds(begin_q, begin_k, seqlen_q, seqlen_k, right, left, right - sizes.right)
    else:
        return whole_sequence(sizes)


@gluon.jit
def plain_walk(n0, sizes, OPTIONS: gl.constexpr):
    """Return the walk of the plain form: all queries, or those from the diagonal on. Where it ends, which takes a
    register, only steps need to know (`walk_of_head`, `add_diagonal`)."""
    if OPTIONS.CAUSAL:
        return Walk(n0, n0, sizes.seqlen_q, sizes.seqlen_q, False, 0)
    else:
        return Walk(0, 0, sizes.seqlen_q, sizes.seqlen_q, False, 0)


@gluon.jit
def tile_of_keys(number, key_tiles, tensors, sizes, OPTIONS: gl.constexpr):
    """Return the tile of this number."""
    n, batch_head = locate_keys(number, key_tiles, sizes, OPTIONS)
    back = walks_back(batch_head, sizes, OPTIONS)
    n0 = n * OPTIONS.BLOCK_N
    batch = batch_head // sizes.num_heads_kv
    head = batch_head % sizes.num_heads_kv
    # The machine code is another one where these stand in another order.
    if OPTIONS.LISTED or not OPTIONS.GENERAL:
        n0 = n * OPTIONS.BLOCK_N
    seen = True
    if OPTIONS.GENERAL:
        sequence = sequence_of(batch, tensors, sizes, OPTIONS)
        walk, seen = query_range(n, sequence, back, OPTIONS)
    else:
        sequence = SequenceBounds(0, 0, sizes.seqlen_q, sizes.seqlen_k, 0, 0, 0)
        walk = plain_walk(n0, sizes, OPTIONS)
    if OPTIONS.PANELS > 1:
        head = batch_head % sizes.num_heads_kv
    return KeyTile(n, n0, batch_head, batch, head, sequence, walk, seen)


@gluon.jit
def add_diagonal(tile, OPTIONS: gl.constexpr):
    """Return the tile, in the plain form with its first key computed anew and the end of its diagonal."""
    if OPTIONS.CAUSAL and not OPTIONS.GENERAL:
        walk, n0 = tile.walk, tile.n * OPTIONS.BLOCK_N
        walk = Walk(n0 + 0, n0 + OPTIONS.BLOCK_N, walk.high, walk.end, walk.back, walk.entries)
        return KeyTile(tile.n, n0, tile.batch_head, tile.batch, tile.head, tile.sequence, walk, tile.seen)
    else:
        return tile


@gluon.jit
def first_row(batch, head, begin_q, num_heads, rows, OPTIONS: gl.constexpr):
    """Return where a query head of a batch entry begins in the workspace, in rows. A packed sequence has whole blocks
    of its own, one at least, whatever its length: `rows` of a head hold the tokens and a block for every sequence."""
    if OPTIONS.PACKED:
        return head * rows + (begin_q + batch * OPTIONS.BLOCK_M) // OPTIONS.BLOCK_M * OPTIONS.BLOCK_M
    else:
        return (batch * num_heads + head) * rows


@gluon.jit
def head_row(tile, member, group_size, sizes, OPTIONS: gl.constexpr):
    """Return where the query head number `member` of the tile's group begins in the workspace, in rows."""
    if OPTIONS.GENERAL:
        head = key_head_of(tile, sizes) * group_size + member
        batch, num_heads = batch_of(tile, sizes), sizes.num_heads_kv * group_size
        return first_row(batch, head, tile.sequence.begin_q, num_heads, sizes.rows, OPTIONS)
    else:
        return (tile.batch_head * group_size + member) * sizes.seqlen_q


@gluon.jit
def rows_of_keys(desc, batch, head, sequence):
    """Return the rows of a head of keys in a tensor."""
    return HeadRows(desc, batch, head, sequence.begin_k, sequence.seqlen_k)


@gluon.jit
def rows_of_queries(desc, batch, head, sequence):
    """Return the rows of a query head in a tensor."""
    return HeadRows(desc, batch, head, sequence.begin_q, sequence.seqlen_q)


# ---- from a counter


@gluon.constexpr_function
def counts_all_tiles(options):
    """Return whether the first tiles come from the counter, too: some are passed over, or all must be taken in
    order."""
    return options.ORDERED or options.PACKED


@gluon.jit
def is_empty(number, key_tiles, tensors, sizes, OPTIONS: gl.constexpr):
    """Return whether the tile begins past the end of its sequence; false for numbers past the last tile."""
    tiles = key_tiles * sizes.batch_heads
    n, batch_head = locate_keys(gl.minimum(number, tiles - 1), key_tiles, sizes, OPTIONS)
    sequence = sequence_of(batch_head // sizes.num_heads_kv, tensors, sizes, OPTIONS)
    return (number < tiles) & (n * OPTIONS.BLOCK_N >= sequence.seqlen_k)


@gluon.jit
def next_tile(key_tiles, tensors, sizes, OPTIONS: gl.constexpr):
    """Return the next tile that has keys, or a number past the last one. All tiles come from the counter where some are
    passed over, or where they must be taken in order; otherwise the first ones are the blocks' own numbers."""
    number = gl.atomic_add(tensors.counter, 1, sem="relaxed")
    if not counts_all_tiles(OPTIONS):
        number = number + gl.num_programs(0)
    if OPTIONS.PACKED:
        empty = is_empty(number, key_tiles, tensors, sizes, OPTIONS)
        while empty:
            number = gl.atomic_add(tensors.counter, 1, sem="relaxed")
            empty = is_empty(number, key_tiles, tensors, sizes, OPTIONS)
    return number


@gluon.jit
def fetch_tile(key_tiles, tensors, ring, slot, sizes, OPTIONS: gl.constexpr):
    """Take the next tile and hand its number on. Return it and the ring's next slot."""
    number = next_tile(key_tiles, tensors, sizes, OPTIONS)
    return number, publish(number, ring, slot)


@gluon.jit
def fetch_first(key_tiles, tensors, ring, slot, sizes, OPTIONS: gl.constexpr):
    """Return the number of a block's first tile and the ring's next slot; hand the number on unless all warps know
    it."""
    if counts_all_tiles(OPTIONS):
        return fetch_tile(key_tiles, tensors, ring, slot, sizes, OPTIONS)
    else:
        return gl.program_id(0), slot


@gluon.jit
def receive_first(ring, slot, OPTIONS: gl.constexpr):
    """Return the number that `fetch_first` returns, and the ring's next slot."""
    if counts_all_tiles(OPTIONS):
        return receive(ring, slot)
    else:
        return gl.program_id(0), slot

"""What the general Hopper backward asks of lengths, masks and order, in Gluon: device functions.

FORM says at compile time which of all this a launch has (form.py).

Nothing outside a sequence is ever read: descriptors end where it ends (packed ones too, see `copy_rows`), and the copy
engine fills in zeros. The statistics lie in a workspace whose rows are padded to whole blocks of queries. Rows of the
padding, and rows that see no key, have a log-sum-exp of `prepare_rows_kernel`'s 1e30: their probabilities are exp2 of
about -1e30, which is 0. But the product of a row of the padding with an infinite key is NaN, so that a partial block of
queries is masked. Keys past the end need a mask, too: their scores are 0, whose probability may overflow. Hence every
step of a partial block of keys is masked, and no step of a whole one but the last, and where the diagonal or the window
cuts it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.backward.form import (
    counts_all_tiles,
    has_diagonal_and_ends,
)
from blocktune.kernels.hopper.common.device_functions import copy_in, copy_out, locate


@gluon.jit
def locate_keys(tile, key_tiles, head_group, batch_heads, OPTIONS: gl.constexpr):
    """(key tile, batch * num_heads_kv + head). Causal, or in a fixed order of additions: of several heads in turns.
    Those of the first keys come first, which are the longest under a diagonal, unless they are the last ones to add."""
    GROUPED: gl.constexpr = OPTIONS.CAUSAL or OPTIONS.ORDERED
    n, batch_head = locate(tile, key_tiles, head_group, batch_heads, GROUPED)
    if OPTIONS.BACK or (OPTIONS.CAUSAL and not OPTIONS.ORDERED):
        n = key_tiles - 1 - n
    elif OPTIONS.BOTH_WAYS:
        n = gl.where(walks_back(batch_head, head_group, batch_heads, OPTIONS), key_tiles - 1 - n, n)
    return n, batch_head


@gluon.jit
def walks_back(batch_head, head_group, batch_heads, OPTIONS: gl.constexpr):
    """Whether the tiles of a head walk back, if that differs from head to head: those of the last group of several."""
    if OPTIONS.BOTH_WAYS:
        return batch_head >= gl.maximum((batch_heads - 1) // head_group, 1) * head_group
    else:
        return False


@gluon.jit
def block_at(place, first, end, back, BLOCK_M: gl.constexpr, OPTIONS: gl.constexpr, entries=None):
    """The block of queries at a place of the walk from first to end, or back.

    back: `walks_back` of the tile. entries: of a list that names the blocks, if any (`walk_of`).
    """
    if OPTIONS.LISTED:
        return gl.load(entries + place // BLOCK_M)
    elif OPTIONS.BACK:
        return first + end - BLOCK_M - place
    elif OPTIONS.BOTH_WAYS:
        return gl.where(back, first + end - BLOCK_M - place, place)
    else:
        return place


@gluon.jit
def block_before(m, back, BLOCK_M: gl.constexpr, OPTIONS: gl.constexpr):
    """The block of queries that a walk, or one back, came to before m."""
    if OPTIONS.BACK:
        return m + BLOCK_M
    elif OPTIONS.BOTH_WAYS:
        return gl.where(back, m + BLOCK_M, m - BLOCK_M)
    else:
        return m - BLOCK_M


@gluon.jit
def places_of(first, low, high, end, back, OPTIONS: gl.constexpr):
    """Between which places of the walk from first to end the blocks from low to high come."""
    if OPTIONS.BACK and not OPTIONS.LISTED:
        return first + end - high, first + end - low
    elif OPTIONS.BOTH_WAYS:
        return gl.where(back, first + end - high, low), gl.where(back, first + end - low, high)
    else:
        return low, high


@gluon.jit
def rotated(place, n0, low, high, OPTIONS: gl.constexpr):
    """The place of the walk that a tile of keys from n0 on has at `place`. Where tiles would add dQ of the same queries
    at the same time, each begins its part without masks, from low to high, with queries of its own, or of a few."""
    if OPTIONS.TOGETHER > 0:
        APART: gl.constexpr = 128 * OPTIONS.TOGETHER
        if APART > 128:
            n0 = n0 // APART * APART
        moved = place + n0 % gl.maximum(high - low, 1)
        moved = gl.where(moved < high, moved, moved - (high - low))
        return gl.where((place >= low) & (place < high), moved, place)
    else:
        return place


@gluon.jit
def listed_walk(n, batch_head, member, sizes, BLOCK_M: gl.constexpr):
    """(entries, low, end) of the list of a tile of keys and the query head number `member` that reads them: a walk from
    0 to end, whose blocks from `low` on are seen in full (`walk_lists`)."""
    batch = batch_head // sizes.num_heads_kv
    head = batch_head % sizes.num_heads_kv * sizes.group_size + member
    listed = sizes.lists + batch.to(gl.int64) * sizes.stride_lb + head.to(gl.int64) * sizes.stride_lh
    listed += n.to(gl.int64) * sizes.stride_ln
    return listed + 2, gl.load(listed) * BLOCK_M, gl.load(listed + 1) * BLOCK_M


@gluon.jit
def listed_turn(entries, place, sizes, BLOCK_M: gl.constexpr):
    """How many tiles of keys have added to the block at a place of a list when it is this one's turn; -1 for none."""
    count = (sizes.stride_ln - 2) // 2  # entries of a list, which as many turns follow
    return gl.load(entries + count + place // BLOCK_M)


@gluon.jit
def walk_of(n, batch_head, member, low, high, end, sizes, BLOCK_M: gl.constexpr, OPTIONS: gl.constexpr):
    """(entries, low, high, end) of the walk of a query head: what its list says, else as given and no entries."""
    if OPTIONS.LISTED:
        entries, low, end = listed_walk(n, batch_head, member, sizes, BLOCK_M)
        return entries, low, end, end
    else:
        return 0, low, high, end


@gluon.jit
def count_listed(n, batch_head, sizes, BLOCK_M: gl.constexpr):
    """The blocks of queries in the lists of a tile of keys, of all query heads that read them."""
    count = 0
    for member in range(sizes.group_size):
        _entries, _low, end = listed_walk(n, batch_head, member, sizes, BLOCK_M)
        count += end // BLOCK_M
    return count


@gluon.jit
def first_query(m, OPTIONS: gl.constexpr):
    """The first query of a block that `block_at` names: an entry of a list says in its lowest bits what is hidden."""
    if OPTIONS.LISTED:
        return m & -4
    else:
        return m


@gluon.jit
def count_key_tiles(seqlen_k, BLOCK_N: gl.constexpr, OPTIONS: gl.constexpr):
    if OPTIONS.GENERAL:
        return (seqlen_k + BLOCK_N - 1) // BLOCK_N
    else:
        return seqlen_k // BLOCK_N


@gluon.jit
def sequence(begins, entry, seqlen, OPTIONS: gl.constexpr):
    """(first position, positions) of a batch entry."""
    if OPTIONS.PACKED:
        begin = gl.load(begins + entry)
        return begin, gl.load(begins + entry + 1) - begin
    else:
        return 0, seqlen


@gluon.jit
def first_row(entry, head, begin_q, num_heads, rows, BLOCK_M: gl.constexpr, OPTIONS: gl.constexpr):
    """Where a query head of a batch entry begins in the workspace, in rows. A packed sequence has whole blocks of its
    own, one at least, whatever its length: `rows` of a head hold the tokens and a block for every sequence."""
    if OPTIONS.PACKED:
        return head * rows + (begin_q + entry * BLOCK_M) // BLOCK_M * BLOCK_M
    else:
        return (entry * num_heads + head) * rows


@gluon.jit
def head_row(
    batch_head, member, num_heads_kv, group_size, begin_q, seqlen_q, rows, BLOCK_M: gl.constexpr, GROUPED: gl.constexpr,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """Where the query head number `member` of a key head begins in the workspace, in rows."""
    if OPTIONS.GENERAL:
        head = batch_head % num_heads_kv * group_size + member
        return first_row(batch_head // num_heads_kv, head, begin_q, num_heads_kv * group_size, rows, BLOCK_M, OPTIONS)
    elif GROUPED:
        return (batch_head * group_size + member) * seqlen_q
    else:
        return batch_head * seqlen_q


@gluon.jit
def bounds_of(upper, lower, len_q, len_k, OPTIONS: gl.constexpr):
    if OPTIONS.LOWER_RIGHT:
        return upper + len_k - len_q, lower + len_k - len_q
    else:
        return upper, lower


@gluon.jit
def query_range(n0, len_q, len_k, upper, lower, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, OPTIONS: gl.constexpr):
    """(first, low, high, end, seen): queries from `first` to `end` see keys n0 .., those from low to high all of them.

    All are multiples of BLOCK_M. There always is one block at least: where nobody sees the keys (`seen` is false), or a
    sequence is empty, it is masked throughout, and gives zeros as dk, dv and part of dq. So no warp ever waits for
    copies that nobody makes. Counts are clamped before they are divided, because // rounds towards zero.
    """
    first = 0
    end = gl.maximum((len_q + BLOCK_M - 1) // BLOCK_M, 1) * BLOCK_M
    low = 0
    high = end
    if OPTIONS.RIGHT and not OPTIONS.LISTED:
        first = gl.maximum(n0 - upper, 0) // BLOCK_M * BLOCK_M
        low = (gl.maximum(n0 + BLOCK_N - 1 - upper, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if OPTIONS.RAGGED_Q:
        high = len_q // BLOCK_M * BLOCK_M
    if OPTIONS.LEFT:
        high = gl.minimum(high, gl.maximum(n0 - lower + 1, 0) // BLOCK_M * BLOCK_M)
        end = gl.minimum(end, (gl.maximum(n0 + BLOCK_N - lower, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    seen = first < end
    end = gl.maximum(end, BLOCK_M)
    first = gl.minimum(first, end - BLOCK_M)
    if OPTIONS.RAGGED_K:
        low = gl.where(n0 + BLOCK_N > len_k, end, low)
    low = gl.minimum(gl.maximum(low, first), end)
    high = gl.minimum(gl.maximum(high, low), end)
    return first, low, high, end, seen


@gluon.jit
def is_within(distances, count):
    """Whether 0 <= distances < count, by one unsigned comparison: of two ptxas packs predicates into registers."""
    return distances.to(gl.uint32, bitcast=True) < count.to(gl.uint32, bitcast=True)


@gluon.jit
def keep_under_diagonal(p, queries, keys, first_hidden, bounds):
    """`keep_seen` with a diagonal and both lengths ragged: a key is seen by queries from its diagonal to the last one.

    A thread has two keys and sixteen queries, so that numbers of a key cost least. With a comparison for each bound
    ptxas leaves no registers to issue dP ahead of the probabilities.
    """
    # [KEYS]
    begin = keys - bounds.upper
    end = gl.where(keys < first_hidden, bounds.queries, begin)
    count = gl.maximum(end - begin, 0)
    # [KEYS, BLOCK_M]
    return gl.where(is_within(queries[None, :] - begin[:, None], count[:, None]), p, 0.0)


@gluon.jit
def keep_seen(p, m, key, bounds, S_L: gl.constexpr, OPTIONS: gl.constexpr):
    """p [keys from `key`, queries from m], and 0 for pairs that do not see each other, whatever it was."""
    KEYS: gl.constexpr = p.shape[0]
    first_hidden = bounds.keys
    if OPTIONS.LISTED:
        first_hidden = gl.where(m >> key // KEYS % 2 & 1 != 0, 0, first_hidden)
    # [BLOCK_M] and [KEYS]
    queries = first_query(m, OPTIONS) + gl.arange(0, p.shape[1], gl.SliceLayout(0, S_L))
    keys = key + gl.arange(0, p.shape[0], gl.SliceLayout(1, S_L))
    # [KEYS, BLOCK_M]
    if has_diagonal_and_ends(OPTIONS):
        p = keep_under_diagonal(p, queries, keys, first_hidden, bounds)
    else:
        if OPTIONS.RIGHT and OPTIONS.LEFT:
            count = bounds.upper - bounds.lower + 1
            p = gl.where(is_within(keys[:, None] - (queries + bounds.lower)[None, :], count), p, 0.0)
        elif OPTIONS.RIGHT:
            p = gl.where((queries + bounds.upper)[None, :] >= keys[:, None], p, 0.0)
        elif OPTIONS.LEFT:
            p = gl.where((queries + bounds.lower)[None, :] <= keys[:, None], p, 0.0)
        if OPTIONS.RAGGED_K:
            p = gl.where((keys < first_hidden)[:, None], p, 0.0)
        if OPTIONS.RAGGED_Q:
            p = gl.where((queries < bounds.queries)[None, :], p, 0.0)
    return p


# ---- copies


@gluon.jit
def copy_rows(desc, entry, head, row, column, begin, length, barrier, memory, OPTIONS: gl.constexpr):
    """Rows `row` .. of a head and sequence into shared memory, zeros past its end.

    The descriptor of packed sequences has two more dimensions. Their strides, 2^34 - s and s for rows that are s
    elements apart, cancel in 64-bit addresses, while the row's coordinate ends at 2^30 with every sequence
    (triton.tools.ragged_tma).
    """
    if OPTIONS.PACKED:
        coord = [1 << 30, begin + length, head, (1 << 30) - length + row, column]
        copy_in(desc, coord, barrier, memory)
    else:
        copy_in(desc, [entry, head, row, column], barrier, memory)


@gluon.jit
def copy_rows_out(desc, entry, head, row, column, begin, length, memory, OPTIONS: gl.constexpr):
    """Rows `row` .. of a head and sequence from shared memory; those past its end are left out."""
    if OPTIONS.PACKED:
        copy_out(desc, [1 << 30, begin + length, head, (1 << 30) - length + row, column], memory)
    else:
        copy_out(desc, [entry, head, row, column], memory)


# ---- tiles from a counter


@gluon.jit
def next_tile(counter, key_tiles, sizes, BLOCK_N: gl.constexpr, OPTIONS: gl.constexpr):
    """The next tile that has keys, or a number past the last one. All tiles come from the counter where some are passed
    over, or where they must be taken in order; otherwise the first ones are the blocks' own numbers."""
    tile = gl.atomic_add(counter, 1, sem="relaxed")
    if not counts_all_tiles(OPTIONS):
        tile = tile + gl.num_programs(0)
    if OPTIONS.PACKED:
        empty = is_empty(tile, key_tiles, sizes, BLOCK_N, OPTIONS)
        while empty:
            tile = gl.atomic_add(counter, 1, sem="relaxed")
            empty = is_empty(tile, key_tiles, sizes, BLOCK_N, OPTIONS)
    return tile


@gluon.jit
def is_empty(tile, key_tiles, sizes, BLOCK_N: gl.constexpr, OPTIONS: gl.constexpr):
    """Whether the tile begins past the end of its sequence; false for numbers past the last tile."""
    tiles = key_tiles * sizes.batch_heads
    n, batch_head = locate_keys(
        gl.minimum(tile, tiles - 1), key_tiles, sizes.head_group, sizes.batch_heads, OPTIONS
    )  # fmt: skip
    _, len_k = sequence(sizes.cu_k, batch_head // sizes.num_heads_kv, sizes.seqlen_k, OPTIONS)
    return (tile < tiles) & (n * BLOCK_N >= len_k)

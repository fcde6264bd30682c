"""What the general Hopper backward asks of lengths, masks and order, in Gluon: device functions.

Nothing outside a sequence is ever read: descriptors end where it ends (packed ones too, see `load_panel`), and the copy
engine fills in zeros. The statistics lie in a workspace whose rows are padded to whole blocks of queries. Rows of the
padding, and rows that see no key, have a log-sum-exp of `prepare_rows_kernel`'s 1e30: their probabilities are exp2 of
about -1e30, which is 0. But the product of a row of the padding with an infinite key is NaN, so that a partial block of
queries is masked. Keys past the end need a mask, too: their scores are 0, whose probability may overflow. Hence every
step of a partial block of keys is masked, and no step of a whole one but the last, and where the diagonal or the window
cuts it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.backward.arguments import Walk


@gluon.jit
def first_key_of(tile, OPTIONS: gl.constexpr):
    """Return the first key of a tile, computed anew unless there are lists."""
    if OPTIONS.LISTED:
        return tile.n0
    else:
        return tile.n * OPTIONS.BLOCK_N


@gluon.jit
def batch_of(tile, sizes):
    """Return the batch entry of a tile of keys, computed anew: `tile.batch` would take a register during a walk."""
    return tile.batch_head // sizes.num_heads_kv


@gluon.jit
def key_head_of(tile, sizes):
    """Return the head of keys of a tile, computed anew."""
    return tile.batch_head % sizes.num_heads_kv


# ---- walks


@gluon.constexpr_function
def begins_with_masks(options):
    """Return whether the blocks of queries that a walk begins with may hold pairs with a key that do not see each
    other; lists begin with them."""
    plain = options.CAUSAL and not options.GENERAL
    first = plain or options.RIGHT or options.LEFT or options.RAGGED_K
    return options.LISTED or (options.LEFT or options.RAGGED_Q if options.BACK else first)


@gluon.constexpr_function
def ends_with_masks(options):
    """Return whether the blocks of queries that a walk ends with may hold such pairs."""
    first = options.RIGHT or options.LEFT or options.RAGGED_K
    last = options.LEFT or options.RAGGED_Q
    return not options.LISTED and not options.BOTH_WAYS and (first if options.BACK else last)


@gluon.constexpr_function
def parts_of_walk(options):
    """Return how many times a walk passes the loops of masked and of other blocks: twice where masks stand at its
    beginning or at its end, as the tile has it."""
    return 2 if options.BOTH_WAYS else 1


@gluon.jit
def walks_back(batch_head, sizes, OPTIONS: gl.constexpr):
    """Return whether the tiles of a head walk back, if that differs from head to head: those of the last group of
    several."""
    if OPTIONS.BOTH_WAYS:
        return batch_head >= gl.maximum((sizes.batch_heads - 1) // sizes.head_group, 1) * sizes.head_group
    else:
        return False


@gluon.jit
def query_range(n, sequence, back, OPTIONS: gl.constexpr):
    """Return the walk of tile n of a head, by queries instead of places, and whether any query sees its keys.

    All queries are multiples of BLOCK_M. There always is one block at least: where nobody sees the keys, or a sequence
    is empty, it is masked throughout, and gives zeros as dk, dv and part of dq. So no warp ever waits for copies that
    nobody makes. Counts are clamped before they are divided, because // rounds towards zero.
    """
    BLOCK_M: gl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    n0 = n * BLOCK_N
    first = 0
    end = gl.maximum((sequence.seqlen_q + BLOCK_M - 1) // BLOCK_M, 1) * BLOCK_M
    low = 0
    high = end
    if OPTIONS.RIGHT and not OPTIONS.LISTED:
        first = gl.maximum(n0 - sequence.right, 0) // BLOCK_M * BLOCK_M
        low = (gl.maximum(n0 + BLOCK_N - 1 - sequence.right, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if OPTIONS.RAGGED_Q:
        high = sequence.seqlen_q // BLOCK_M * BLOCK_M
    if OPTIONS.LEFT:
        high = gl.minimum(high, gl.maximum(n0 - sequence.left + 1, 0) // BLOCK_M * BLOCK_M)
        end = gl.minimum(end, (gl.maximum(n0 + BLOCK_N - sequence.left, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    seen = first < end
    end = gl.maximum(end, BLOCK_M)
    first = gl.minimum(first, end - BLOCK_M)
    if OPTIONS.RAGGED_K:
        low = gl.where(n0 + BLOCK_N > sequence.seqlen_k, end, low)
    low = gl.minimum(gl.maximum(low, first), end)
    high = gl.minimum(gl.maximum(high, low), end)
    return Walk(first, low, high, end, back, 0), seen


@gluon.jit
def place_walk(walk, OPTIONS: gl.constexpr):
    """Return the walk by places: where it goes back, the blocks from low to high come at others."""
    low, high = walk.low, walk.high
    if OPTIONS.BACK and not OPTIONS.LISTED:
        low, high = walk.first + walk.end - walk.high, walk.first + walk.end - walk.low
    elif OPTIONS.BOTH_WAYS:
        low = gl.where(walk.back, walk.first + walk.end - walk.high, walk.low)
        high = gl.where(walk.back, walk.first + walk.end - walk.low, walk.high)
    return Walk(walk.first, low, high, walk.end, walk.back, walk.entries)


@gluon.jit
def block_at(walk, place, OPTIONS: gl.constexpr):
    """Return the first query of the block at a place of a walk; of a list the entry that names the block, which says in
    its lowest bits what is hidden."""
    if OPTIONS.LISTED:
        return gl.load(walk.entries + place // OPTIONS.BLOCK_M)
    elif OPTIONS.BACK:
        return walk.first + walk.end - OPTIONS.BLOCK_M - place
    elif OPTIONS.BOTH_WAYS:
        return gl.where(walk.back, walk.first + walk.end - OPTIONS.BLOCK_M - place, place)
    else:
        return place


@gluon.jit
def first_query(m, OPTIONS: gl.constexpr):
    """Return the first query of a block that `block_at` names."""
    if OPTIONS.LISTED:
        return m & -4
    else:
        return m


@gluon.jit
def block_before(m, back, OPTIONS: gl.constexpr):
    """Return the block of queries that a walk, or one back, came to before m."""
    if OPTIONS.BACK:
        return m + OPTIONS.BLOCK_M
    elif OPTIONS.BOTH_WAYS:
        return gl.where(back, m + OPTIONS.BLOCK_M, m - OPTIONS.BLOCK_M)
    else:
        return m - OPTIONS.BLOCK_M


@gluon.jit
def rotate(walk, place, n0, OPTIONS: gl.constexpr):
    """Return the place of the walk that a tile of keys from n0 on has at `place`. Where tiles would add dQ of the same
    queries at the same time, each begins its part without masks, from low to high, with queries of its own, or of a
    few."""
    if OPTIONS.TOGETHER > 0:
        APART: gl.constexpr = 128 * OPTIONS.TOGETHER
        if APART > 128:
            n0 = n0 // APART * APART
        moved = place + n0 % gl.maximum(walk.high - walk.low, 1)
        moved = gl.where(moved < walk.high, moved, moved - (walk.high - walk.low))
        return gl.where((place >= walk.low) & (place < walk.high), moved, place)
    else:
        return place


# ---- lists of blocks


@gluon.jit
def list_of_blocks(tile, member, tensors, sizes):
    """Return a pointer to the list of a tile of keys and the query head number `member` that reads them
    (`walk_lists`)."""
    batch = batch_of(tile, sizes)
    head = key_head_of(tile, sizes) * sizes.group_size + member
    listed = tensors.lists + batch.to(gl.int64) * sizes.list_batch + head.to(gl.int64) * sizes.list_head
    return listed + tile.n.to(gl.int64) * sizes.list_tile


@gluon.jit
def walk_of_head(tile, member, tensors, sizes, OPTIONS: gl.constexpr):
    """Return the walk of the query head number `member`: the tile's, or that of its list, whose blocks from `low` on
    are seen in full."""
    walk = tile.walk
    if OPTIONS.LISTED:
        listed = list_of_blocks(tile, member, tensors, sizes)
        entries = listed + 2
        low = gl.load(listed) * OPTIONS.BLOCK_M
        end = gl.load(listed + 1) * OPTIONS.BLOCK_M
        return Walk(walk.first, low, end, end, walk.back, entries)
    elif OPTIONS.CAUSAL and not OPTIONS.GENERAL and not OPTIONS.AHEAD:
        return Walk(walk.first, tile.n0 + OPTIONS.BLOCK_N, walk.high, walk.end, walk.back, walk.entries)
    else:
        return walk


@gluon.jit
def count_listed(tile, tensors, sizes, OPTIONS: gl.constexpr):
    """Count the blocks of queries in the lists of a tile of keys, of all query heads that read them."""
    count = 0
    for member in range(sizes.group_size):
        count += walk_of_head(tile, member, tensors, sizes, OPTIONS).end // OPTIONS.BLOCK_M
    return count


@gluon.jit
def listed_turn(entries, place, sizes, OPTIONS: gl.constexpr):
    """Return how many tiles of keys have added to the block at a place of a list when it is this one's turn; -1 for
    none."""
    count = (sizes.list_tile - 2) // 2  # entries of a list, which as many turns follow
    return gl.load(entries + count + place // OPTIONS.BLOCK_M)


# ---- masks


@gluon.constexpr_function
def has_diagonal_and_ends(options):
    """Return whether a diagonal alone hides keys from a query, and the last blocks of keys and of queries may be
    parts."""
    return options.RIGHT and options.RAGGED_K and options.RAGGED_Q and not options.LEFT


@gluon.jit
def is_within(distances, count):
    """Return whether 0 <= distances < count, by one unsigned comparison: of two ptxas packs predicates into
    registers."""
    return distances.to(gl.uint32, bitcast=True) < count.to(gl.uint32, bitcast=True)


@gluon.jit
def keep_under_diagonal(p, queries, keys, first_hidden, sequence):
    """Do what `keep_seen` does with a diagonal and both lengths ragged: a key is seen by queries from its diagonal to
    the last one.

    A thread has two keys and sixteen queries, so that numbers of a key cost least. With a comparison for each bound
    ptxas leaves no registers to issue dP ahead of the probabilities.
    """
    # [KEYS]
    begin = keys - sequence.right
    end = gl.where(keys < first_hidden, sequence.seqlen_q, begin)
    count = gl.maximum(end - begin, 0)
    # [KEYS, BLOCK_M]
    return gl.where(is_within(queries[None, :] - begin[:, None], count[:, None]), p, 0.0)


@gluon.jit
def keep_seen(p, m, key, sequence, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Return p [keys from `key`, queries from m], and 0 for pairs that do not see each other, whatever it was."""
    KEYS: gl.constexpr = p.shape[0]
    first_hidden = sequence.seqlen_k
    if OPTIONS.LISTED:
        first_hidden = gl.where(m >> key // KEYS % 2 & 1 != 0, 0, first_hidden)
    # [BLOCK_M] and [KEYS]
    queries = first_query(m, OPTIONS) + gl.arange(0, p.shape[1], gl.SliceLayout(0, S_L))
    keys = key + gl.arange(0, p.shape[0], gl.SliceLayout(1, S_L))
    # [KEYS, BLOCK_M]
    if not OPTIONS.GENERAL:
        p = gl.where(queries[None, :] >= keys[:, None], p, 0.0)
    elif has_diagonal_and_ends(OPTIONS):
        p = keep_under_diagonal(p, queries, keys, first_hidden, sequence)
    else:
        if OPTIONS.RIGHT and OPTIONS.LEFT:
            count = sequence.right - sequence.left + 1
            p = gl.where(is_within(keys[:, None] - (queries + sequence.left)[None, :], count), p, 0.0)
        elif OPTIONS.RIGHT:
            p = gl.where((queries + sequence.right)[None, :] >= keys[:, None], p, 0.0)
        elif OPTIONS.LEFT:
            p = gl.where((queries + sequence.left)[None, :] <= keys[:, None], p, 0.0)
        if OPTIONS.RAGGED_K:
            p = gl.where((keys < first_hidden)[:, None], p, 0.0)
        if OPTIONS.RAGGED_Q:
            p = gl.where((queries < sequence.seqlen_q)[None, :], p, 0.0)
    return p

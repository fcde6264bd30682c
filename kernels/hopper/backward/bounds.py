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
    has_edge,
    has_lower,
    has_moving_bounds,
    has_tail,
    has_upper,
    is_general,
    is_ordered,
    is_packed,
)
from blocktune.kernels.hopper.common.device_functions import copy_in, copy_out, locate


@gluon.jit
def locate_keys(tile, key_tiles, head_group, batch_heads, CAUSAL: gl.constexpr, FORM: gl.constexpr):
    """(key tile, batch * num_heads_kv + head). Causal: the longest first, which are those of the first keys. In a fixed
    order of additions always those of the last keys first, which are the shortest."""
    n, batch_head = locate(tile, key_tiles, head_group, batch_heads, CAUSAL)
    if is_ordered(FORM) != CAUSAL:
        n = key_tiles - 1 - n
    return n, batch_head


@gluon.jit
def count_key_tiles(seqlen_k, BLOCK_N: gl.constexpr, FORM: gl.constexpr):
    if is_general(FORM):
        return (seqlen_k + BLOCK_N - 1) // BLOCK_N
    else:
        return seqlen_k // BLOCK_N


@gluon.jit
def sequence(begins, entry, seqlen, FORM: gl.constexpr):
    """(first position, positions) of a batch entry."""
    if is_packed(FORM):
        begin = gl.load(begins + entry)
        return begin, gl.load(begins + entry + 1) - begin
    else:
        return 0, seqlen


@gluon.jit
def first_row(entry, head, begin_q, num_heads, rows, BLOCK_M: gl.constexpr, FORM: gl.constexpr):
    """Where a query head of a batch entry begins in the workspace, in rows. A packed sequence has whole blocks of its
    own, one at least, whatever its length: `rows` of a head hold the tokens and a block for every sequence."""
    if is_packed(FORM):
        return head * rows + (begin_q + entry * BLOCK_M) // BLOCK_M * BLOCK_M
    else:
        return (entry * num_heads + head) * rows


@gluon.jit
def bounds_of(upper, lower, len_q, len_k, FORM: gl.constexpr):
    if has_moving_bounds(FORM):
        return upper + len_k - len_q, lower + len_k - len_q
    else:
        return upper, lower


@gluon.jit
def query_range(n0, len_q, len_k, upper, lower, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, FORM: gl.constexpr):
    """(first, low, high, end, seen): queries from `first` to `end` see keys n0 .., those from low to high all of them.

    All are multiples of BLOCK_M. There always is one block at least: where nobody sees the keys (`seen` is false), or a
    sequence is empty, it is masked throughout, and gives zeros as dk, dv and part of dq. So no warp ever waits for
    copies that nobody makes. Counts are clamped before they are divided, because // rounds towards zero.
    """
    first = 0
    end = gl.maximum((len_q + BLOCK_M - 1) // BLOCK_M, 1) * BLOCK_M
    low = 0
    high = end
    if has_upper(FORM):
        first = gl.maximum(n0 - upper, 0) // BLOCK_M * BLOCK_M
        low = (gl.maximum(n0 + BLOCK_N - 1 - upper, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if has_tail(FORM):
        high = len_q // BLOCK_M * BLOCK_M
    if has_lower(FORM):
        high = gl.minimum(high, gl.maximum(n0 - lower + 1, 0) // BLOCK_M * BLOCK_M)
        end = gl.minimum(end, (gl.maximum(n0 + BLOCK_N - lower, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    seen = first < end
    end = gl.maximum(end, BLOCK_M)
    first = gl.minimum(first, end - BLOCK_M)
    if has_edge(FORM):
        low = gl.where(n0 + BLOCK_N > len_k, end, low)
    low = gl.minimum(gl.maximum(low, first), end)
    high = gl.minimum(gl.maximum(high, low), end)
    return first, low, high, end, seen


@gluon.jit
def keep_seen(p, m, key, bounds, S_L: gl.constexpr, FORM: gl.constexpr):
    """p [keys from `key`, queries from m], and 0 for pairs that do not see each other, whatever it was."""
    # [BLOCK_M] and [KEYS]
    queries = m + gl.arange(0, p.shape[1], gl.SliceLayout(0, S_L))
    keys = key + gl.arange(0, p.shape[0], gl.SliceLayout(1, S_L))
    # [KEYS, BLOCK_M]
    if has_upper(FORM):
        p = gl.where((queries + bounds.upper)[None, :] >= keys[:, None], p, 0.0)
    if has_lower(FORM):
        p = gl.where((queries + bounds.lower)[None, :] <= keys[:, None], p, 0.0)
    if has_edge(FORM):
        p = gl.where((keys < bounds.keys)[:, None], p, 0.0)
    if has_tail(FORM):
        p = gl.where((queries < bounds.queries)[None, :], p, 0.0)
    return p


@gluon.jit
def bend(s, cap_in):
    """tanh of the capped score, which is s * cap_in / (2 log2 e): an exponential that overflows gives 1, one that
    vanishes -1."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(s * cap_in))


# ---- copies


@gluon.jit
def copy_rows(desc, entry, head, row, column, begin, length, barrier, memory, FORM: gl.constexpr):
    """Rows `row` .. of a head and sequence into shared memory, zeros past its end.

    The descriptor of packed sequences has two more dimensions. Their strides, 2^34 - s and s for rows that are s
    elements apart, cancel in 64-bit addresses, while the row's coordinate ends at 2^30 with every sequence
    (triton.tools.ragged_tma).
    """
    if is_packed(FORM):
        coord = [1 << 30, begin + length, head, (1 << 30) - length + row, column]
        copy_in(desc, coord, barrier, memory)
    else:
        copy_in(desc, [entry, head, row, column], barrier, memory)


@gluon.jit
def copy_rows_out(desc, entry, head, row, column, begin, length, memory, FORM: gl.constexpr):
    """Rows `row` .. of a head and sequence from shared memory; those past its end are left out."""
    if is_packed(FORM):
        copy_out(desc, [1 << 30, begin + length, head, (1 << 30) - length + row, column], memory)
    else:
        copy_out(desc, [entry, head, row, column], memory)


# ---- tiles from a counter


@gluon.jit
def next_tile(counter, key_tiles, sizes, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, FORM: gl.constexpr):
    """The next tile that has keys, or a number past the last one. All tiles come from the counter where some are passed
    over, or where they must be taken in order; otherwise the first ones are the blocks' own numbers."""
    tile = gl.atomic_add(counter, 1, sem="relaxed")
    if not counts_all_tiles(FORM):
        tile = tile + gl.num_programs(0)
    if is_packed(FORM):
        empty = is_empty(tile, key_tiles, sizes, BLOCK_N, CAUSAL, FORM)
        while empty:
            tile = gl.atomic_add(counter, 1, sem="relaxed")
            empty = is_empty(tile, key_tiles, sizes, BLOCK_N, CAUSAL, FORM)
    return tile


@gluon.jit
def is_empty(tile, key_tiles, sizes, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, FORM: gl.constexpr):
    """Whether the tile begins past the end of its sequence; false for numbers past the last tile."""
    tiles = key_tiles * sizes.batch_heads
    n, batch_head = locate_keys(
        gl.minimum(tile, tiles - 1), key_tiles, sizes.head_group, sizes.batch_heads, CAUSAL, FORM
    )  # fmt: skip
    _, len_k = sequence(sizes.cu_k, batch_head // sizes.num_heads_kv, sizes.seqlen_k, FORM)
    return (tile < tiles) & (n * BLOCK_N >= len_k)


# ---- a fixed order of additions
#
# Tiles of a head add their part of dq of a block of queries by turns, the one with the last keys first. A turn is the
# number of tiles that have added, times the warps that pass it on (WARPS): one elected lane of every warp counts, so
# that whichever lane issued the copy has counted only after its copy was complete. Tiles are taken from the counter in
# this order, and a tile waits for those of its head alone that were taken before it. The first unfinished tile of all
# therefore never waits for long: it is in work (its block took it, and every tile before it in that block's queue is
# finished), and what it waits for is finished.
#
# Of heads up to 128 one warp adds both halves of a step and passes one turn (`adder`). Of wider ones each warpgroup
# adds and passes turns of its own half, so that the two halves of a block never hold each other.
#
# Why the last keys first: a walk begins where the diagonal cuts the tile. Of two neighbours that begin together, the
# one with the later keys is ahead by a tile's keys from the first step on, and whoever waits for it finds it done. In
# the order of the keys every tile would wait until the one before it has walked down to its own diagonal.


@gluon.constexpr_function
def await_asm():
    return """{
.reg .pred p;
.reg .b32 found;
setp.lt.s32 p, $2, 0;
@p bra DONE;
AGAIN:
ld.acquire.gpu.global.b32 found, [$1];
setp.ne.s32 p, found, $2;
@p bra AGAIN;
DONE:
fence.proxy.async;
mov.b32 $0, $2;
}"""


@gluon.constexpr_function
def pass_asm():
    return """{
.reg .pred p, q;
cp.async.bulk.wait_group 0;
bar.warp.sync 0xffffffff;
elect.sync _|p, 0xffffffff;
setp.ge.s32 q, $2, 0;
and.pred p, p, q;
@p red.release.gpu.global.add.s32 [$1], 1;
mov.b32 $0, $2;
}"""


@gluon.jit
def await_turn(turn, count):
    """Until `count` has been counted there; at once if it is negative."""
    ASM: gl.constexpr = await_asm()
    address = turn.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(ASM, "=r,l,r,~{memory}", [address, count], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(turn, count):
    """Counts once the additions of these warps are complete in global memory; does not if `count` is negative."""
    ASM: gl.constexpr = pass_asm()
    address = turn.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(ASM, "=r,l,r,~{memory}", [address, count], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def turn_of(
    n, m, bounds, seen, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr, FORM: gl.constexpr
):  # fmt: skip
    """How much has been counted for the queries from m on when it is tile n's turn; -1 where the tile adds only zeros.
    Tiles that are seen by the queries follow each other without a gap; the first to add holds the last key that the
    last of the queries sees."""
    last = (bounds.keys - 1) // BLOCK_N
    if has_upper(FORM):
        last = gl.minimum(last, gl.maximum(m + BLOCK_M - 1 + bounds.upper, 0) // BLOCK_N)
    return gl.where(seen, WARPS * (last - n), -1)

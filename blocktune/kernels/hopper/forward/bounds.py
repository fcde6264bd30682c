"""Which keys the tiles, blocks and rows of the Hopper attention forward see, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def sequence(batch, right, left, cu_q, cu_k, LOWER_RIGHT: gl.constexpr):
    """Of a packed sequence: where its queries and keys begin, how many there are, and the bounds of the keys that query
    0 sees; from the lower right they are relative to the distance of the last query and the last key."""
    begin_q = gl.load(cu_q + batch)
    begin_k = gl.load(cu_k + batch)
    length_q = gl.load(cu_q + batch + 1) - begin_q
    length_k = gl.load(cu_k + batch + 1) - begin_k
    if LOWER_RIGHT:
        right += length_k - length_q
        left += length_k - length_q
    return begin_q, begin_k, length_q, length_k, right, left


@gluon.jit
def key_range(
    row, seqlen_q, seqlen_k, right, left, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, RIGHT: gl.constexpr,
    LEFT: gl.constexpr,
):  # fmt: skip
    """(first, last): the blocks of keys that queries row .. row + ROWS - 1 walk along, from the last to the first.

    There is always one, even where no row sees a key: no tile is without a step, and the pipeline has no exception.
    """
    high = seqlen_k
    if RIGHT:
        high = gl.minimum(high, gl.minimum(row + ROWS, seqlen_q) + right)
    last = gl.maximum(high - 1, 0) // BLOCK_N
    first = last * 0
    if LEFT:
        first = gl.minimum(gl.maximum(row + left, 0) // BLOCK_N, last)
    return first, last


@gluon.constexpr_function
def walks_round(options):
    """Whether a walk begins where the tile's queries stand and goes round: ALiBi on both sides leaves the keys far
    behind a query as low as those far ahead, and a walk from the last key would raise maxima in every block. Packed
    sequences, and what is loaded a block ahead, need the walk from the last key."""
    return options.ALIBI == 2 and not (options.LOWER_RIGHT or options.RIGHT or options.LEFT or options.MASK)


@gluon.jit
def walk_start(row, diagonal, last, ROWS: gl.constexpr, OPTIONS: gl.constexpr):
    """The block of keys that the walk of queries row .. row + ROWS - 1 begins with."""
    if walks_round(OPTIONS):
        return gl.minimum(gl.maximum(row + ROWS - 1 + diagonal, 0) // OPTIONS.BLOCK_N, last)
    else:
        return last


@gluon.jit
def walked(block, last, OPTIONS: gl.constexpr):
    """The block that a walk comes to: from block 0 it goes on to the last one, if it goes round."""
    if walks_round(OPTIONS):
        return gl.where(block < 0, block + last + 1, block)
    else:
        return block


@gluon.jit
def stretch(part, start, last, place, BLOCK_N: gl.constexpr):
    """(first block, how many, how many of these are crossed, and how many hidden in part) of a part of a walk that goes
    round, behind its first block `start`: down to the last block with a key that is not ahead of all 64 places of rows
    from `place` on, down to block 0, and from the last block down.

    Crossed are blocks with keys behind a row's place and with others; hidden in part is the last one.
    """
    ahead = gl.minimum((gl.maximum(place + 64, 0) + BLOCK_N - 1) // BLOCK_N, start)
    crossed = ahead - gl.minimum(gl.maximum(place + 1, 0) // BLOCK_N, ahead)
    first = gl.where(part == 0, start, gl.where(part == 1, ahead, last + 1)) - 1
    end = gl.where(part == 0, ahead, gl.where(part == 1, 0, start + 1))
    return first, first + 1 - end, gl.where(part == 1, crossed, 0), part // 2


@gluon.jit
def row_bounds(
    row, seqlen_k, right, left, ROWS: gl.constexpr, RAGGED: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr,
    ROW_S: gl.constexpr,
):  # fmt: skip
    """(last, first): the keys that queries row .. row + ROWS - 1 see, each its own; first only counts if LEFT."""
    # [ROWS]
    rows = row + gl.arange(0, ROWS, ROW_S)
    last = rows + right
    if not RIGHT:
        last = gl.full([ROWS], seqlen_k - 1, gl.int32, ROW_S)
    elif RAGGED:
        last = gl.minimum(last, seqlen_k - 1)
    return last, rows + left


@gluon.jit
def hide(qk, last, first, column, BOUND: gl.constexpr, LEFT: gl.constexpr, S_L: gl.constexpr):
    """The scores of the keys from `column` on, -inf where the query does not see the key. BOUND: `last` says something
    (of full blocks without a right bound it does not)."""
    # [BLOCK_N]
    columns = column + gl.arange(0, qk.shape[1], gl.SliceLayout(0, S_L))
    # [64, BLOCK_N]
    if BOUND:
        qk = gl.where(last[:, None] >= columns[None, :], qk, float("-inf"))
    if LEFT:
        qk = gl.where(first[:, None] <= columns[None, :], qk, float("-inf"))
    return qk

"""The sequence that a tile belongs to and the keys that its rows see, in Gluon: what all kernels agree on."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class SequenceBounds(NamedTuple):
    """A sequence: its lengths, and the keys i + left .. i + right that query i of it sees.

    begin_q and begin_k: its first token among packed ones, 0 where a batch entry is a sequence. shift: the distance
    of its diagonal from that of the launch.
    """

    begin_q: Any
    begin_k: Any
    seqlen_q: Any
    seqlen_k: Any
    right: Any
    left: Any
    shift: Any


class KeyBlocks(NamedTuple):
    """The blocks of keys that a tile walks along, from the last to the first."""

    first: Any
    last: Any


class RowBounds(NamedTuple):
    """The last and the first key that each row of a warpgroup sees."""

    last: Any
    first: Any


class MaskBounds(NamedTuple):
    """Which keys the rows of a warpgroup see, and the columns `lowest` .. `highest` from which on a block is wholly
    visible to all of them."""

    rows: Any
    lowest: Any
    highest: Any


@gluon.jit
def whole_sequence(sizes):
    """Return the bounds of a batch entry that is one sequence."""
    return SequenceBounds(
        begin_q=0,
        begin_k=0,
        seqlen_q=sizes.seqlen_q,
        seqlen_k=sizes.seqlen_k,
        right=sizes.right,
        left=sizes.left,
        shift=0,
    )


@gluon.jit
def packed_sequence(batch, cu_q, cu_k, sizes, LOWER_RIGHT: gl.constexpr):
    """Return the bounds of a packed sequence; from the lower right they are relative to the distance of its last query
    and its last key."""
    begin_q = gl.load(cu_q + batch)
    begin_k = gl.load(cu_k + batch)
    seqlen_q = gl.load(cu_q + batch + 1) - begin_q
    seqlen_k = gl.load(cu_k + batch + 1) - begin_k
    right, left = sizes.right, sizes.left
    shift = 0
    if LOWER_RIGHT:
        shift = seqlen_k - seqlen_q
        right += shift
        left += shift
    return SequenceBounds(
        begin_q=begin_q, begin_k=begin_k, seqlen_q=seqlen_q, seqlen_k=seqlen_k, right=right, left=left, shift=shift
    )


@gluon.jit
def cached_sequence(batch, cu_q, lengths, sizes, LOWER_RIGHT: gl.constexpr):
    """Return the bounds of queries, packed or not, and of the keys that an entry of a cache has. The cache says where
    these lie."""
    begin_q = 0
    seqlen_q = sizes.seqlen_q
    if cu_q is not None:
        begin_q = gl.load(cu_q + batch)
        seqlen_q = gl.load(cu_q + batch + 1) - begin_q
    seqlen_k = gl.load(lengths + batch)
    right, left = sizes.right, sizes.left
    shift = 0
    if LOWER_RIGHT:
        shift = seqlen_k - seqlen_q
        right += shift
        left += shift
    return SequenceBounds(
        begin_q=begin_q, begin_k=0, seqlen_q=seqlen_q, seqlen_k=seqlen_k, right=right, left=left, shift=shift
    )


@gluon.jit
def key_range(row, sequence, ROWS: gl.constexpr, OPTIONS: gl.constexpr):
    """Return the blocks of keys that queries row .. row + ROWS - 1 walk along.

    There is always one, even where no row sees a key: no tile is without a step, and the pipeline has no exception.
    """
    high = sequence.seqlen_k
    if OPTIONS.RIGHT:
        high = gl.minimum(high, gl.minimum(row + ROWS, sequence.seqlen_q) + sequence.right)
    last = gl.maximum(high - 1, 0) // OPTIONS.BLOCK_N
    first = last * 0
    if OPTIONS.LEFT:
        first = gl.minimum(gl.maximum(row + sequence.left, 0) // OPTIONS.BLOCK_N, last)
    return KeyBlocks(first=first, last=last)


@gluon.jit
def row_bounds(row, sequence, ROWS: gl.constexpr, OPTIONS: gl.constexpr, ROW_S: gl.constexpr):
    """Return the keys that queries row .. row + ROWS - 1 see; the first ones only count with a left bound."""
    # [ROWS]
    rows = row + gl.arange(0, ROWS, ROW_S)
    last = rows + sequence.right
    if not OPTIONS.RIGHT:
        last = gl.full([ROWS], sequence.seqlen_k - 1, gl.int32, ROW_S)
    elif OPTIONS.RAGGED:
        last = gl.minimum(last, sequence.seqlen_k - 1)
    first = 0
    if OPTIONS.LEFT:
        first = rows + sequence.left
    return RowBounds(last=last, first=first)


@gluon.jit
def mask_bounds(rows, row, sequence, ROWS: gl.constexpr, OPTIONS: gl.constexpr):
    """Return the `MaskBounds` of queries row .. row + ROWS - 1, given their `row_bounds`."""
    highest = sequence.seqlen_k - OPTIONS.BLOCK_N
    if OPTIONS.RIGHT:
        highest = gl.minimum(sequence.seqlen_k, row + sequence.right + 1) - OPTIONS.BLOCK_N
    lowest = 0
    if OPTIONS.LEFT:
        lowest = row + ROWS - 1 + sequence.left
    return MaskBounds(rows=rows, lowest=lowest, highest=highest)


@gluon.jit
def hide(qk, rows, column, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Return the scores of the keys from `column` on, -inf where the query does not see the key."""
    # [BLOCK_N]
    columns = column + gl.arange(0, qk.shape[1], gl.SliceLayout(0, S_L))
    # [64, BLOCK_N]
    if OPTIONS.RAGGED or OPTIONS.RIGHT:  # of full blocks without a right bound the last key says nothing
        qk = gl.where(rows.last[:, None] >= columns[None, :], qk, float("-inf"))
    if OPTIONS.LEFT:
        qk = gl.where(rows.first[:, None] <= columns[None, :], qk, float("-inf"))
    return qk

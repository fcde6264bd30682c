"""What makes a score more than a product in the Hopper forward, and what drops probabilities, in Gluon.

ALiBi is arithmetic on positions. A mask lies in memory as the registers of a warpgroup want it
(kernels/hopper/biases/mask_pass.py): of a boolean one a thread loads a word for each of its two rows, of an additive
one 16 bytes at a time, both a block ahead, since the products alone are too short for it. Pairs to drop are made from
their positions while products run. What they give is applied in the softmax.

Numbers of a thread's rows are [64, 4] and scores are [64, N / 8, 4, 2], as kernels/hopper/common/rows.py has them.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.biases.philox import kept_bits, place_of_key
from blocktune.kernels.hopper.biases.words import (
    alibi,
    as_float32,
    bits_of_block,
    numbers_of_keys,
    thread_positions,
    values_of_block,
    where_set,
)
from blocktune.kernels.hopper.common.rows import broadcast_rows, by_thread, thread_sum
from blocktune.kernels.hopper.forward.lines import terms_of_slope, turned_if
from blocktune.kernels.hopper.forward.row_maxima import softmax

# ---- what a tile and a block ask for


class Line(NamedTuple):
    """ALiBi of a block of keys: the slope, and its terms as an operand (lines.py)."""

    slope: Any
    terms: Any


class TileBiases(NamedTuple):
    """What a consumer's 64 rows have of the biases of a launch; 0 for what there is not.

    launch: `Biases`. batch_head: batch * num_heads + head. row: the first row; place: the key that it stands at. rows,
    pairs: `thread_positions`. line: the `Line` of keys that are not right of a row's place. mask_tile: a pointer to the
    tile of the mask.
    """

    launch: Any
    batch_head: Any
    row: Any
    place: Any
    rows: Any
    pairs: Any
    line: Any
    mask_tile: Any


@gluon.jit
def biases_of_rows(biases, batch, head, row, sequence, no_acc, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Return what a consumer's 64 rows from `row` on have, from the place to the tile of the mask."""
    rows, pairs = 0, 0
    slope, terms, place = 0, 0, 0
    tile = 0
    if OPTIONS.ALIBI or OPTIONS.MASK == 1 or OPTIONS.DROPOUT:
        rows, pairs = thread_positions(by_thread(no_acc))
    if OPTIONS.ALIBI:
        at = batch.to(gl.int64) * biases.slope_batch + head * biases.slope_head
        slope = gl.load(biases.slopes + at)
        if OPTIONS.MASK != 2:
            slope = slope / biases.unit
        place = row + biases.diagonal + sequence.shift
    if OPTIONS.LINES:
        terms = terms_of_slope(slope, S_L)
    if OPTIONS.MASK:
        m = gl.minimum(row, gl.maximum(sequence.seqlen_q - 1, 0)) // 64
        at = batch.to(gl.int64) * biases.mask_batch + head * biases.mask_head + m * biases.mask_tile
        TILE: gl.constexpr = 64 * 4 if OPTIONS.MASK == 1 else 64 * 128
        tile = biases.mask + at * TILE
    return place, rows, pairs, Line(slope=slope, terms=terms), tile


@gluon.jit
def loaded_of_block(bias, column, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Load what a block needs of the mask; 0 without one."""
    loaded = 0
    if OPTIONS.MASK == 1:
        loaded = bits_of_block(bias.mask_tile, column, bias.rows, bias.pairs, OPTIONS.BLOCK_N)
    if OPTIONS.MASK == 2:
        loaded = values_of_block(bias.mask_tile, column, OPTIONS.BLOCK_N, S_L)
    return loaded


# ---- scores


@gluon.jit
def line_of_keys(column, bias, OPTIONS: gl.constexpr):
    """Return the `Line` of the keys from `column` on: where all of them are right of all places of the rows, the slope
    has the other sign."""
    slope, terms = bias.line.slope, bias.line.terms
    if OPTIONS.ALIBI == 2:
        ahead = column >= bias.place + 64
        slope = gl.where(ahead, -slope, slope)
        if OPTIONS.LINES:
            terms = turned_if(ahead, terms)
    return Line(slope=slope, terms=terms)


@gluon.jit
def alibi_of_block(column, slope, bias, no_acc, S_L: gl.constexpr):
    """Return what ALiBi adds to the scores [64, N] of the keys from `column` on where all of them are on one side of
    all places of the rows: a line. Otherwise it is right for keys up to a row's place (`add_right_alibi`)."""
    distance = (bias.rows + (bias.place - column) - 2 * bias.pairs).to(gl.float32)
    added = alibi(by_thread(no_acc), slope, distance, True)
    return gl.convert_layout(gl.reshape(added, no_acc.shape), S_L)


@gluon.jit
def distance_of_block(column, slope, bias):
    """Return what all scores of a row [64, 4] upon `line_of_block` are too high by."""
    return bias.rows.to(gl.float32) * slope + (bias.place - column).to(gl.float32) * slope


@gluon.jit
def add_right_alibi(qk, column, slope, bias, S_L: gl.constexpr):
    """Undo the sign of `alibi_of_block` for keys right of a row's place: subtract twice what it adds there."""
    # [64, 4], [64, N / 8, 4, 2]
    distance = (bias.rows + (bias.place - column) - 2 * bias.pairs).to(gl.float32)
    s = by_thread(qk)
    past = gl.maximum(numbers_of_keys(s, 8).to(gl.float32) - broadcast_rows(distance, s), 0.0)
    return gl.convert_layout(gl.reshape(s - 2.0 * slope * past, qk.shape), S_L)


@gluon.jit
def is_crossed(column, bias, OPTIONS: gl.constexpr):
    """Return whether of the keys from `column` on some are right of a row's place and some are not, so that ALiBi is
    no line: one or two blocks of a walk."""
    crossed = False
    if OPTIONS.ALIBI == 2:
        crossed = (column < bias.place + 64) & (column + OPTIONS.BLOCK_N > bias.place + 1)
    return crossed


@gluon.constexpr_function
def begins_with_alibi(options):
    """Return whether nothing bends or scales scores before ALiBi joins them: then their accumulator may begin with
    it."""
    return bool(options.ALIBI) and not options.SOFTCAP and options.MASK != 2


@gluon.constexpr_function
def begins_with_mask(options):
    """Return whether scores begin with an additive mask: where nothing else comes between, and where all queries lie in
    registers, so that they can be multiplied by `binary_part` of the unit."""
    queries_first = options.FREE_Q and options.QK_PANELS == 1
    return options.MASK == 2 and queries_first and not options.SOFTCAP and not options.ALIBI


@gluon.jit
def binary_part(unit):
    """Return the power of two at or below a number above zero: queries times it are exact."""
    return (unit.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def other_part(unit):
    """Return a number above zero over its `binary_part`, from 1 to below 2."""
    return unit / binary_part(unit)


@gluon.jit
def mask_of_block(loaded, unit):
    """Return what the scores begin with: a mask in units of the other part of the unit, which is 1 with a head_dim of
    64."""
    mask = as_float32(loaded)
    other = other_part(unit)
    if other != 1.0:
        mask = mask * (1.0 / other)
    return mask


@gluon.jit
def add_biases(qk, block, loaded, bias, no_acc, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Return the scores of a `Block` with all else that the features add; in natural units if the mask is additive."""
    if OPTIONS.MASK == 2 and not begins_with_mask(OPTIONS):
        qk = qk * bias.launch.unit
    if OPTIONS.ALIBI and not begins_with_alibi(OPTIONS):
        qk = qk + alibi_of_block(block.column, block.line.slope, bias, no_acc, S_L)
    if OPTIONS.ALIBI == 2:
        if block.crossed:
            qk = add_right_alibi(qk, block.column, block.line.slope, bias, S_L)
    if OPTIONS.MASK == 1:
        s = where_set(loaded, by_thread(qk), "0fFF800000")  # minus infinity
        qk = gl.convert_layout(gl.reshape(s, qk.shape), S_L)
    if OPTIONS.MASK == 2 and not begins_with_mask(OPTIONS):
        qk = qk + as_float32(loaded)
    return qk


@gluon.jit
def natural_scales(scale, unit, OPTIONS: gl.constexpr):
    """Return `scales_of` for scores in natural units, which may be as low as float32 goes: such rows are scaled by one,
    below the scale of log2(e), since any power above would leave infinities."""
    own = scale
    if begins_with_mask(OPTIONS):
        own = scale * other_part(unit)
    return own, scale * 0.0 + 1.0


@gluon.jit
def first_natural_softmax(qk, no_acc, scales, S_L: gl.constexpr):
    """Compute `first_softmax` for scores in natural units."""
    LOWEST: gl.constexpr = -3.4028234663852886e38
    _, whole = scales
    # [64, 4]
    nothing = thread_sum(by_thread(no_acc))
    p, top, _, sums = softmax(qk, (nothing + LOWEST, nothing + whole), scales, S_L)
    return p, top, nothing + 1.0, sums


# ---- dropout


@gluon.jit
def kept_of_block(bias, column, OPTIONS: gl.constexpr):
    """Return the pairs of a block that dropout keeps, as `kept_bits`; 0 without dropout."""
    kept = 0
    if OPTIONS.DROPOUT:
        words = bias.launch
        kept = kept_bits(
            bias.rows + bias.row, bias.pairs, column // 16, bias.batch_head, words.offset, words.seed_lo, words.seed_hi,
            words.threshold, OPTIONS.BLOCK_N,
        )  # fmt: skip
    return kept


@gluon.jit
def dropped(p, kept, DROPOUT: gl.constexpr, S_L: gl.constexpr):
    """Return the probabilities, zero where dropout does not keep the pair."""
    if DROPOUT:
        p = gl.convert_layout(gl.reshape(where_set(kept, by_thread(p), "0f00000000", place_of_key), p.shape), S_L)
    return p

"""What makes a score more than a product in the Hopper forward, and what drops probabilities, in Gluon.

ALiBi is arithmetic on positions. A mask lies in memory as the registers of a warpgroup want it
(kernels/hopper/biases/mask_pass.py): of a boolean one a thread loads a word for each of its two rows, of an additive
one 16 bytes at a time, both a block ahead, since the products alone are too short for it. Pairs to drop are made from
their positions while products run. What they give is applied in the softmax.

Numbers of a thread's rows are [64, 4] and scores are [64, N / 8, 4, 2], as kernels/hopper/common/rows.py has them.
"""

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
from blocktune.kernels.hopper.common.rows import beside, by_thread, thread_sum
from blocktune.kernels.hopper.forward.lines import terms_of_slope, turned_if
from blocktune.kernels.hopper.forward.row_maxima import softmax

# ---- what a tile and a block ask for


@gluon.jit
def biases_of_tile(biases, batch, head, row_start, length_q, no_acc, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """(rows, pairs, slope, its terms, tile of the mask) for a consumer's 64 rows from row_start on; 0 for what there is
    not."""
    rows, pairs, slope, terms, tile = 0, 0, 0, 0, 0
    if OPTIONS.ALIBI or OPTIONS.MASK == 1 or OPTIONS.DROPOUT:
        rows, pairs = thread_positions(by_thread(no_acc))
    if OPTIONS.ALIBI:
        place = batch.to(gl.int64) * biases.slope_batch + head * biases.slope_head
        slope = gl.load(biases.slopes + place)
        if OPTIONS.MASK != 2:
            slope = slope / biases.unit
    if OPTIONS.LINES:
        terms = terms_of_slope(slope, S_L)
    if OPTIONS.MASK:
        m = gl.minimum(row_start, gl.maximum(length_q - 1, 0)) // 64
        place = batch.to(gl.int64) * biases.mask_batch + head * biases.mask_head + m * biases.mask_tile
        TILE: gl.constexpr = 64 * 4 if OPTIONS.MASK == 1 else 64 * 128
        tile = biases.mask + place * TILE
    return rows, pairs, slope, terms, tile


@gluon.jit
def loaded_of_block(tile_biases, column, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """What a block needs of the mask; 0 without one."""
    rows, pairs, _, _, tile = tile_biases
    loaded = 0
    if OPTIONS.MASK == 1:
        loaded = bits_of_block(tile, column, rows, pairs, OPTIONS.BLOCK_N)
    if OPTIONS.MASK == 2:
        loaded = values_of_block(tile, column, OPTIONS.BLOCK_N, S_L)
    return loaded


# ---- scores


@gluon.jit
def biases_of_block(column, row_start, moved, biases, tile_biases, OPTIONS: gl.constexpr):
    """`biases_of_tile` as the keys from `column` on want them: where all of them are ahead of all places of the rows,
    ALiBi is a line whose slope has the other sign."""
    rows, pairs, slope, terms, tile = tile_biases
    if OPTIONS.ALIBI == 2:
        ahead = column >= row_start + biases.diagonal + moved + 64
        slope = gl.where(ahead, -slope, slope)
        if OPTIONS.LINES:
            terms = turned_if(ahead, terms)
    return rows, pairs, slope, terms, tile


@gluon.jit
def alibi_of_block(column, row_start, moved, no_acc, biases, tile_biases, S_L: gl.constexpr):
    """What ALiBi adds to the scores [64, N] of the keys from `column` on where all of them are on one side of all
    places of the rows: a line. Otherwise it is right for keys up to a row's place (`behind`)."""
    rows, pairs, slope, _, _ = tile_biases
    place = row_start + biases.diagonal + moved
    distance = (rows + (place - column) - 2 * pairs).to(gl.float32)
    bias = alibi(by_thread(no_acc), slope, distance, True)
    return gl.convert_layout(gl.reshape(bias, no_acc.shape), S_L)


@gluon.jit
def distance_of_block(column, row_start, moved, biases, tile_biases):
    """What all scores of a row [64, 4] upon `line_of_block` are too high by."""
    rows, _, slope, _, _ = tile_biases
    place = row_start + biases.diagonal + moved
    return rows.to(gl.float32) * slope + (place - column).to(gl.float32) * slope


@gluon.jit
def behind(qk, column, row_start, moved, biases, tile_biases, S_L: gl.constexpr):
    """The scores upon `alibi_of_block`, less twice what it adds for keys behind a row's place."""
    rows, pairs, slope, _, _ = tile_biases
    place = row_start + biases.diagonal + moved
    # [64, 4], [64, N / 8, 4, 2]
    distance = (rows + (place - column) - 2 * pairs).to(gl.float32)
    s = by_thread(qk)
    past = gl.maximum(numbers_of_keys(s, 8).to(gl.float32) - beside(distance, s), 0.0)
    return gl.convert_layout(gl.reshape(s - 2.0 * slope * past, qk.shape), S_L)


@gluon.jit
def is_crossed(column, row_start, moved, biases, OPTIONS: gl.constexpr):
    """Whether of the keys from `column` on some are behind a row's place and some are not, so that ALiBi is no line:
    one or two blocks of a walk."""
    crossed = False
    if OPTIONS.ALIBI == 2:
        place = row_start + biases.diagonal + moved
        crossed = (column < place + 64) & (column + OPTIONS.BLOCK_N > place + 1)
    return crossed


@gluon.constexpr_function
def begins_with_alibi(options):
    """Whether nothing bends or scales scores before ALiBi joins them: then their accumulator may begin with it."""
    return bool(options.ALIBI) and not options.SOFTCAP and options.MASK != 2


@gluon.constexpr_function
def begins_with_mask(options):
    """Whether scores begin with an additive mask: where nothing else comes between, and where all queries lie in
    registers, so that they can be multiplied by `binary_part` of the unit."""
    queries_first = options.FREE_Q and options.QK_PANELS == 1
    return options.MASK == 2 and queries_first and not options.SOFTCAP and not options.ALIBI


@gluon.jit
def binary_part(unit):
    """The power of two at or below a number above zero: queries times it are exact."""
    return (unit.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def other_part(unit):
    """A number above zero over its `binary_part`, from 1 to below 2."""
    return unit / binary_part(unit)


@gluon.jit
def mask_of_block(loaded, unit):
    """What the scores begin with: a mask in units of the other part of the unit, which is 1 with a head_dim of 64."""
    mask = as_float32(loaded)
    other = other_part(unit)
    if other != 1.0:
        mask = mask * (1.0 / other)
    return mask


@gluon.jit
def biased(
    qk, column, crossed, row_start, moved, loaded, no_acc, biases, tile_biases, OPTIONS: gl.constexpr,
    S_L: gl.constexpr,
):  # fmt: skip
    """The scores with all else that the features add; in natural units if the mask is additive. crossed: `is_crossed`
    of the block."""
    if OPTIONS.MASK == 2 and not begins_with_mask(OPTIONS):
        qk = qk * biases.unit
    if OPTIONS.ALIBI and not begins_with_alibi(OPTIONS):
        qk = qk + alibi_of_block(column, row_start, moved, no_acc, biases, tile_biases, S_L)
    if OPTIONS.ALIBI == 2:
        if crossed:
            qk = behind(qk, column, row_start, moved, biases, tile_biases, S_L)
    if OPTIONS.MASK == 1:
        s = where_set(loaded, by_thread(qk), "0fFF800000")  # minus infinity
        qk = gl.convert_layout(gl.reshape(s, qk.shape), S_L)
    if OPTIONS.MASK == 2 and not begins_with_mask(OPTIONS):
        qk = qk + as_float32(loaded)
    return qk


@gluon.jit
def natural_scales(scale, unit, OPTIONS: gl.constexpr):
    """`scales_of` for scores in natural units, which may be as low as float32 goes: such rows are scaled by one, below
    the scale of log2(e), since any power above would leave infinities."""
    own = scale
    if begins_with_mask(OPTIONS):
        own = scale * other_part(unit)
    return own, scale * 0.0 + 1.0


@gluon.jit
def first_natural_softmax(qk, no_acc, scales, S_L: gl.constexpr):
    """`first_softmax` for scores in natural units."""
    LOWEST: gl.constexpr = -3.4028234663852886e38
    _, whole = scales
    # [64, 4]
    nothing = thread_sum(by_thread(no_acc))
    p, top, _, sums = softmax(qk, (nothing + LOWEST, nothing + whole), scales, S_L)
    return p, top, nothing + 1.0, sums


# ---- dropout


@gluon.jit
def kept_of_block(biases, tile_biases, row_start, column, batch_head, OPTIONS: gl.constexpr):
    """The pairs of a block that dropout keeps, as `kept_bits`; 0 without dropout."""
    rows, pairs, _, _, _ = tile_biases
    kept = 0
    if OPTIONS.DROPOUT:
        kept = kept_bits(
            rows + row_start, pairs, column // 16, batch_head, biases.offset, biases.seed_lo, biases.seed_hi,
            biases.threshold, OPTIONS.BLOCK_N,
        )  # fmt: skip
    return kept


@gluon.jit
def dropped(p, kept, DROPOUT: gl.constexpr, S_L: gl.constexpr):
    """The probabilities, zero where dropout does not keep the pair."""
    if DROPOUT:
        p = gl.convert_layout(gl.reshape(where_set(kept, by_thread(p), "0f00000000", place_of_key), p.shape), S_L)
    return p

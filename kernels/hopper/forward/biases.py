"""What makes a score more than a product in the Hopper forward, and what drops probabilities, in Gluon.

ALiBi is arithmetic on positions. A mask lies in memory as the registers of a warpgroup want it (mask_pass.py): of a
boolean one a thread loads a word for each of its two rows, of an additive one 16 bytes at a time. Pairs to drop are
made from their positions. Loads and random numbers are issued while products run, and what they give is applied in
the softmax.

Numbers of a thread's rows are [64, 4] and scores are [64, N / 8, 4, 2], as kernels/hopper/common/rows.py has them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.common.device_functions import pin
from blocktune.kernels.hopper.common.rows import beside, by_thread, thread_sum
from blocktune.kernels.hopper.forward.row_maxima import softmax

# ---- positions


@gluon.jit
def thread_positions(scores):
    """(row, pair) [64, 4]: of what a thread has of scores [64, N / 8, 4, 2] the row, and the keys 2 pair, 2 pair + 1 of
    every eight."""
    L: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(1, scores.type.layout))
    rows = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, L)), 1)
    pairs = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, L)), 0)
    return rows + pairs * 0, pairs + rows * 0


@gluon.jit
def numbers_of_keys(scores, EIGHT: gl.constexpr):
    """[1, N / 8, 1, 2]: EIGHT for every eight keys and one for the second key of a thread's pair, constants all."""
    L: gl.constexpr = scores.type.layout
    EIGHTS_L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    PAIR_L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, L)))
    eights = gl.arange(0, scores.shape[1], EIGHTS_L) * EIGHT
    eights = gl.expand_dims(gl.expand_dims(gl.expand_dims(eights, 0), 2), 3)
    pair = gl.arange(0, 2, PAIR_L)
    return eights + gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 0), 0), 0)


# ---- what a tile and a block ask for


@gluon.jit
def biases_of_tile(biases, batch, head, row_start, length_q, no_acc, OPTIONS: gl.constexpr):
    """(rows, pairs, slope, tile of the mask) for a consumer's 64 rows from row_start on; 0 for what there is not."""
    rows, pairs, slope, tile = 0, 0, 0, 0
    if OPTIONS.ALIBI or OPTIONS.MASK == 1 or OPTIONS.DROPOUT:
        rows, pairs = thread_positions(by_thread(no_acc))
    if OPTIONS.ALIBI:
        place = batch.to(gl.int64) * biases.slope_batch + head * biases.slope_head
        slope = gl.load(biases.slopes + place)
        if OPTIONS.MASK != 2:
            slope = slope / biases.unit
    if OPTIONS.MASK:
        m = gl.minimum(row_start, gl.maximum(length_q - 1, 0)) // 64
        place = batch.to(gl.int64) * biases.mask_batch + head * biases.mask_head + m * biases.mask_tile
        TILE: gl.constexpr = 64 * 4 if OPTIONS.MASK == 1 else 64 * 128
        tile = biases.mask + place * TILE
    return rows, pairs, slope, tile


@gluon.jit
def bits_of_block(tile, column, rows, pairs, N: gl.constexpr):
    """Words [64, 4] whose bit 2 i + j says whether a row sees key 8 i + 2 pair + j of the block from `column` on."""
    words = gl.load(tile + (column // 128 * 256 + rows * 4 + pairs))
    if N == 64:
        words = words >> (column // 64 % 2 * 16)
    return words


@gluon.jit
def values_of_block(tile, column, N: gl.constexpr, S_L: gl.constexpr):
    """The part [64, N] of an additive mask."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    sixteens = gl.expand_dims(gl.arange(0, N // 16, gl.SliceLayout(1, L)), 1)
    inside = gl.expand_dims(gl.arange(0, 1024, gl.SliceLayout(0, L)), 0)
    # [N / 16, 1024]: 16 keys of 64 rows, eight values of a thread side by side
    values = gl.load(tile + (column * 64 + sixteens * 1024 + inside))
    # sixteen keys | warp | lane / 4 | lane % 4 | + 8 keys | + 8 rows | pair
    values = gl.reshape(values, [N // 16, 4, 8, 4, 2, 2, 2])
    values = gl.reshape(gl.permute(values, (1, 5, 2, 0, 4, 3, 6)), [64, N])
    return gl.convert_layout(values, S_L)


@gluon.jit
def loaded_of_block(tile_biases, column, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """What a block needs of the mask; 0 without one."""
    rows, pairs, _, tile = tile_biases
    loaded = 0
    if OPTIONS.MASK == 1:
        loaded = bits_of_block(tile, column, rows, pairs, OPTIONS.BLOCK_N)
    if OPTIONS.MASK == 2:
        loaded = values_of_block(tile, column, OPTIONS.BLOCK_N, S_L)
    return loaded


# ---- scores


@gluon.constexpr_function
def select_asm(count, other):
    """Assembly for `count` numbers of a thread, two of row r and two of row r + 8 in turns, or `other` where a bit of
    the row's word is not set. Operands, `count` of each: results, numbers, words, of which the places 0 and 2 count.
    """
    text = ["{", ".reg .pred p;", ".reg .b32 bit;"]
    for row in range(2):
        for number in range(count // 2):
            at = number // 2 * 4 + 2 * row + number % 2
            text += [f"and.b32 bit, ${2 * count + 2 * row}, {1 << number};", "setp.ne.s32 p, bit, 0;"]
            text += [f"selp.f32 ${at}, ${count + at}, {other}, p;"]
    return "\n".join([*text, "}"])


@gluon.constexpr_function
def select_constraints(count):
    return ",".join(["=&f"] * count + ["f"] * count + ["r"] * count)


@gluon.jit
def where_set(words, numbers, OTHER: gl.constexpr):
    """The numbers [64, N / 8, 4, 2] of whose pairs the words [64, 4] have the bit, and OTHER, a float as assembly has
    it, in the place of the rest."""
    COUNT: gl.constexpr = numbers.shape[1] * 4
    ASM: gl.constexpr = select_asm(COUNT, OTHER)
    CONSTRAINTS: gl.constexpr = select_constraints(COUNT)
    return gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [numbers, beside(words, numbers)], dtype=gl.float32, is_pure=True, pack=COUNT
    )


@gluon.jit
def alibi(scores, slope, distance, ONE_SIDE: gl.constexpr):
    """minus slope * |distance|, like the scores [64, N / 8, 4, 2]. distance [64, 4]: from a thread's first key to the
    row's place. ONE_SIDE: no row sees a key behind its place."""
    slope = pin(slope)  # its products with the constants below would be kept in registers
    keys = numbers_of_keys(scores, 8).to(gl.float32)
    distance = beside(distance, scores)
    if ONE_SIDE:
        return slope * keys - slope * distance
    return -slope * gl.abs(distance - keys)


@gluon.jit
def alibi_of_block(column, row_start, moved, no_acc, biases, tile_biases, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """What ALiBi adds to the scores [64, N] of the keys from `column` on."""
    rows, pairs, slope, _ = tile_biases
    distance = (rows + (row_start + biases.diagonal + moved - column) - 2 * pairs).to(gl.float32)
    bias = alibi(by_thread(no_acc), slope, distance, OPTIONS.ALIBI == 1)
    return gl.convert_layout(gl.reshape(bias, no_acc.shape), S_L)


@gluon.constexpr_function
def begins_with_alibi(options):
    """Whether nothing bends or scales scores before ALiBi joins them: then their accumulator may begin with it."""
    return bool(options.ALIBI) and not options.SOFTCAP and options.MASK != 2


@gluon.jit
def biased(qk, column, row_start, moved, loaded, no_acc, biases, tile_biases, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """The scores with all else that the features add; in natural units if the mask is additive."""
    if OPTIONS.MASK == 2:
        qk = qk * biases.unit
    if OPTIONS.ALIBI and not begins_with_alibi(OPTIONS):
        qk = qk + alibi_of_block(column, row_start, moved, no_acc, biases, tile_biases, OPTIONS, S_L)
    if OPTIONS.MASK == 1:
        s = where_set(loaded, by_thread(qk), "0fFF800000")  # minus infinity
        qk = gl.convert_layout(gl.reshape(s, qk.shape), S_L)
    if OPTIONS.MASK == 2:
        qk = qk + as_float32(loaded)
    return qk


@gluon.jit
def as_float32(values):
    """Values of a mask. Pairs of bfloat16 are taken apart by one instruction each."""
    if values.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=r,=r,r", [values], dtype=gl.float32, is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        return values.to(gl.float32)


@gluon.jit
def natural_scales(scale):
    """`scales_of` for scores in natural units, which may be as low as float32 goes: such rows are scaled by one, below
    the scale of log2(e), since any power above would leave infinities."""
    return scale, scale * 0.0 + 1.0


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


@gluon.constexpr_function
def philox_asm(head, offset, rounds):
    """Assembly that leaves in a, b, c, d the words of the counter (a, row, head, offset) under the keys ka and kb of
    the rounds, as kernels/values/dropout.py has it."""
    text = ["mov.b32 b, row;", f"mov.b32 c, {head};", f"mov.b32 d, {offset};"]
    for i in range(rounds):
        text += ["mul.wide.u32 wide, a, 0xD2511F53;", "mov.b64 {la, ha}, wide;"]
        text += ["mul.wide.u32 wide, c, 0xCD9E8D57;", "mov.b64 {lc, hc}, wide;"]
        text += ["xor.b32 x, hc, b;", f"xor.b32 a, x, ka{i};", "mov.b32 b, lc;"]
        text += ["xor.b32 x, ha, d;", f"xor.b32 c, x, kb{i};", "mov.b32 d, la;"]
    return text


@gluon.constexpr_function
def keep_asm(count):
    """Assembly for which of a thread's `count` pairs in each of two rows dropout keeps.

    Four neighbouring lanes have the same eights of keys, two keys of each, in the rows r and r + 8. Each makes the
    numbers of half of the eights in one of the rows: lane % 2 says which row, lane / 2 whether the even or the odd
    eights. Then lanes give each other what they have for them: first the lane two further, which has the other eights,
    and then the neighbour, which has the other row. Operands: two words as results, then rows, the pair and the first
    eight, twice each, and the scalars of `kept_bits`.
    """
    rows, pair, first, head, offset, low, high, least = range(2, 18, 2)
    rounds, words = 7, "abcd"
    text = ["{", ".reg .pred odd, late, p;", ".reg .b64 wide;", ".reg .b32 row, eight, own, other, shift, above;"]
    text += [".reg .b32 a, b, c, d, la, ha, lc, hc, x, ta, tb, tc, td;", f".reg .b32 ka<{rounds}>, kb<{rounds}>;"]
    text += [f"and.b32 x, ${pair}, 1;", "setp.ne.u32 odd, x, 0;", f"selp.b32 row, ${rows + 1}, ${rows}, odd;"]
    text += [f"shr.u32 shift, ${pair}, 1;", "setp.ne.u32 late, shift, 0;", f"add.u32 eight, shift, ${first};"]
    text += [f"shl.b32 above, ${least}, 16;", *(f"mov.b32 t{word}, 0;" for word in words)]
    for i in range(rounds):
        text += [f"add.u32 ka{i}, ${low}, {i * 0x9E3779B9 % 2**32};"]
        text += [f"add.u32 kb{i}, ${high}, {i * 0xBB67AE85 % 2**32};"]
    for number in range(count // 4):
        text += [f"add.u32 a, eight, {2 * number};", *philox_asm(f"${head}", f"${offset}", rounds)]
        for word in words:  # two numbers: the lower half, moved up, and the upper one
            text += [f"shl.b32 x, {word}, 16;", "setp.ge.u32 p, x, above;"]
            text += [f"@p or.b32 t{word}, t{word}, {1 << 4 * number};", f"setp.ge.u32 p, {word}, above;"]
            text += [f"@p or.b32 t{word}, t{word}, {2 << 4 * number};"]
    # the bits of two lanes fill the gaps of each other
    text += ["selp.b32 x, ta, tc, late;", "selp.b32 other, tb, td, late;", "shl.b32 other, other, 2;"]
    text += ["or.b32 other, other, x;", "shfl.sync.bfly.b32 other, other, 2, 0x1f, 0xffffffff;"]
    text += ["selp.b32 a, tc, ta, late;", "selp.b32 b, td, tb, late;", "and.b32 c, other, 0x33333333;"]
    text += ["shr.u32 d, other, 2;", "and.b32 d, d, 0x33333333;"]
    for own, given in (("a", "c"), ("b", "d")):
        text += [f"@late shl.b32 {own}, {own}, 2;", f"@!late shl.b32 {given}, {given}, 2;"]
        text += [f"or.b32 {own}, {own}, {given};"]
    text += ["selp.b32 own, b, a, odd;", "selp.b32 other, a, b, odd;"]
    text += ["shfl.sync.bfly.b32 other, other, 1, 0x1f, 0xffffffff;"]
    text += ["selp.b32 $0, other, own, odd;", "selp.b32 $1, own, other, odd;", "}"]
    return "\n".join(text)


@gluon.jit
def kept_bits(rows, pairs, first, head, offset, seed_lo, seed_hi, threshold, N: gl.constexpr):
    """Words [64, 4] like those of `bits_of_block` for the pairs that dropout keeps. rows: queries [64, 4]; first: the
    number of the block's first eight keys; head: batch * num_heads + head."""
    ASM: gl.constexpr = keep_asm(N // 4)
    return gl.inline_asm_elementwise(
        ASM, "=&r,=&r" + ",r" * 16, [rows, pairs, first, head, offset, seed_lo, seed_hi, threshold],
        dtype=gl.int32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def kept_of_block(biases, tile_biases, row_start, column, batch_head, OPTIONS: gl.constexpr):
    """The pairs of a block that dropout keeps, as `kept_bits`; 0 without dropout."""
    rows, pairs, _, _ = tile_biases
    kept = 0
    if OPTIONS.DROPOUT:
        kept = kept_bits(
            rows + row_start, pairs, column // 8, batch_head, biases.offset, biases.seed_lo, biases.seed_hi,
            biases.threshold, OPTIONS.BLOCK_N,
        )  # fmt: skip
    return kept


@gluon.jit
def dropped(p, kept, DROPOUT: gl.constexpr, S_L: gl.constexpr):
    """The probabilities, zero where dropout does not keep the pair."""
    if DROPOUT:
        p = gl.convert_layout(gl.reshape(where_set(kept, by_thread(p), "0f00000000"), p.shape), S_L)
    return p

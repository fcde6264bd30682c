"""Which pairs dropout keeps, in words of a thread's pairs, in Gluon: device functions."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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


@gluon.constexpr_function
def keep_keys_asm():
    """Assembly for which of a thread's pairs dropout keeps where rows are keys: sixteen queries in each of two keys.

    Eight lanes have the same queries, in the keys r and r + 8 of one eight each. A counter gives the numbers of eight
    keys, so that each of the lanes makes those of two queries of its own, and then they give each other what is theirs:
    a transposition of eight lanes and eight places, by exchanges with the lanes 4, 8 and 16 further. Operands: two
    words as results, then keys, the pair and the first query, twice each, and the scalars of `kept_bits_of_keys`.
    """
    keys, pair, query, head, offset, low, high, least = range(2, 18, 2)
    rounds, words = 7, "abcd"
    text = ["{", ".reg .pred p;", ".reg .b64 wide;", ".reg .b32 lane, eight, first, row, found, given, above;"]
    text += [f".reg .b32 a, b, c, d, la, ha, lc, hc, x, ka<{rounds}>, kb<{rounds}>;"]
    text += [f"and.b32 lane, ${keys}, 7;", f"shr.u32 eight, ${keys}, 3;", f"shl.b32 first, ${pair}, 1;"]
    text += ["shl.b32 x, lane, 3;", "add.u32 first, first, x;", f"add.u32 first, first, ${query};"]
    text += [f"shl.b32 above, ${least}, 16;", "mov.b32 found, 0;"]
    for i in range(rounds):
        text += [f"add.u32 ka{i}, ${low}, {i * 0x9E3779B9 % 2**32};"]
        text += [f"add.u32 kb{i}, ${high}, {i * 0xBB67AE85 % 2**32};"]
    for number in range(4):  # two eights of keys, two queries
        bit = 16 * (number // 2) + number % 2
        text += [f"add.u32 a, eight, {number // 2};", f"add.u32 row, first, {number % 2};"]
        text += philox_asm(f"${head}", f"${offset}", rounds)
        for i, word in enumerate(words):  # two keys: the lower half, moved up, and the upper one
            text += [f"shl.b32 x, {word}, 16;", "setp.ge.u32 p, x, above;"]
            text += [f"@p or.b32 found, found, {1 << bit + 4 * i};", f"setp.ge.u32 p, {word}, above;"]
            text += [f"@p or.b32 found, found, {1 << bit + 4 * i + 2};"]
    for step, kept in enumerate((0x33333333, 0x0F0F0F0F, 0x00FF00FF)):
        text += [f"shfl.sync.bfly.b32 given, found, {4 << step}, 0x1f, 0xffffffff;"]
        text += [f"and.b32 x, lane, {1 << step};", "setp.ne.u32 p, x, 0;"]
        text += [f"@p shr.u32 given, given, {2 << step};", f"@!p shl.b32 given, given, {2 << step};"]
        text += [f"selp.b32 x, {kept}, {kept ^ 0xFFFFFFFF}, p;", "lop3.b32 found, given, x, found, 0xE2;"]
    return "\n".join([*text, "mov.b32 $0, found;", "shr.u32 $1, found, 16;", "}"])


@gluon.jit
def kept_bits_of_keys(keys, pairs, query, head, offset, seed_lo, seed_hi, threshold):
    """Words [64, 4] of the pairs that dropout keeps: bit 2 i + j of a key's is the query's 8 i + 2 pair + j of 64.

    keys: their numbers [64, 4]; query: the first one's; head: batch * num_heads + head. Bits from 16 on say nothing.
    """
    ASM: gl.constexpr = keep_keys_asm()
    return gl.inline_asm_elementwise(
        ASM, "=&r,=&r" + ",r" * 16, [keys, pairs, query, head, offset, seed_lo, seed_hi, threshold],
        dtype=gl.int32, is_pure=True, pack=2,
    )  # fmt: skip

"""Which pairs dropout keeps, in words of a thread's pairs, in Gluon: device functions.

Sixteen keys of a query share a counter (kernels/values/dropout.py). A number is a byte of its own above one that all
sixteen share, and a pair is kept if it reaches the threshold. Four bytes of a word are compared at once with the upper
byte of the threshold, or with one more where the shared byte is below the lower byte.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def philox_asm(head, offset, rounds):
    """Return assembly that leaves in a, b, c, d the words of the counter (a, row, head, offset) under the keys ka and
    kb of the rounds, as kernels/values/dropout.py has it."""
    text = ["mov.b32 b, row;", f"mov.b32 c, {head};", f"mov.b32 d, {offset};"]
    for i in range(rounds):
        text += ["mul.wide.u32 wide, a, 0xD2511F53;", "mov.b64 {la, ha}, wide;"]
        text += ["mul.wide.u32 wide, c, 0xCD9E8D57;", "mov.b64 {lc, hc}, wide;"]
        text += ["xor.b32 x, hc, b;", f"xor.b32 a, x, ka{i};", "mov.b32 b, lc;"]
        text += ["xor.b32 x, ha, d;", f"xor.b32 c, x, kb{i};", "mov.b32 d, la;"]
    return text


@gluon.constexpr_function
def keys_asm(low, high, rounds):
    """Return assembly that declares the registers of `philox_asm` and leaves the keys of the rounds in ka and kb."""
    text = [".reg .b64 wide;", ".reg .b32 row, a, b, c, d, la, ha, lc, hc, x;"]
    text += [f".reg .b32 ka<{rounds}>, kb<{rounds}>;"]
    for i in range(rounds):
        text += [f"add.u32 ka{i}, {low}, {i * 0x9E3779B9 % 2**32};"]
        text += [f"add.u32 kb{i}, {high}, {i * 0xBB67AE85 % 2**32};"]
    return text


@gluon.constexpr_function
def threshold_asm(threshold):
    """Return assembly that prepares `reach_asm`. A byte reaches the upper byte of the threshold if the sum of its lower
    seven bits and what those of the threshold leave of 128 has the eighth bit, or the byte itself has: `either` is all
    ones where one of these is enough, and zero where both must be. `rest` is that summand in every byte, `less` the one
    of an upper byte that is one higher, and shared bytes below the uppermost of `lower` ask for it."""
    text = [".reg .pred raised;", ".reg .b32 rest, less, lower, either, reached;"]
    text += [f"shr.u32 x, {threshold}, 8;", "and.b32 rest, x, 127;", "sub.u32 rest, 128, rest;"]
    text += ["mul.lo.u32 rest, rest, 0x01010101;", "sub.u32 less, rest, 0x01010101;"]
    text += [f"shl.b32 lower, {threshold}, 24;", "setp.lt.u32 raised, x, 128;", "selp.b32 either, -1, 0, raised;"]
    return text


@gluon.constexpr_function
def summand_asm():
    """Return assembly that leaves in x the summand of the words of a counter."""
    text = ["xor.b32 x, a, b;", "xor.b32 x, x, c;", "xor.b32 x, x, d;"]
    return [*text, "setp.lt.u32 raised, x, lower;", "selp.b32 x, less, rest, raised;"]


@gluon.constexpr_function
def reach_asm(word):
    """Return assembly that leaves in `reached` a word whose bits 7, 15, 23 and 31 say which bytes of another one reach
    the threshold: the majority of that word, the sum and `either`."""
    text = [f"and.b32 reached, {word}, 0x7F7F7F7F;", "add.u32 reached, reached, x;"]
    return [*text, f"lop3.b32 reached, reached, {word}, either, 0xE8;"]


@gluon.constexpr_function
def keep_asm(count):
    """Return assembly for which of a thread's `count` pairs in each of two rows dropout keeps.

    Four neighbouring lanes have the same sixteens of keys, four keys of each, in the rows r and r + 8. Each makes the
    numbers of half of the sixteens in one of the rows: lane % 2 says which row, lane / 2 whether the even or the odd
    sixteens. Then lanes give each other what they have for them: first the lane two further, which has the other
    sixteens, and then the neighbour, which has the other row. Operands: two words as results, then rows, the pair and
    the first sixteen, twice each, and the scalars of `kept_bits`.
    """
    rows, pair, first, head, offset, low, high, least = range(2, 18, 2)
    rounds, words = 7, "abcd"
    text = ["{", ".reg .pred odd, late;", ".reg .b32 sixteen, own, other, shift, ta, tb, tc, td;"]
    text += [*keys_asm(f"${low}", f"${high}", rounds), *threshold_asm(f"${least}")]
    text += [f"and.b32 x, ${pair}, 1;", "setp.ne.u32 odd, x, 0;", f"selp.b32 row, ${rows + 1}, ${rows}, odd;"]
    text += [f"shr.u32 shift, ${pair}, 1;", "setp.ne.u32 late, shift, 0;", f"add.u32 sixteen, shift, ${first};"]
    text += [f"mov.b32 t{word}, 0;" for word in words]
    for number in reversed(range(count // 8)):  # the first one's bits are the uppermost of each byte
        text += [f"add.u32 a, sixteen, {2 * number};", *philox_asm(f"${head}", f"${offset}", rounds), *summand_asm()]
        for word in words:
            text += [*reach_asm(word), f"shr.u32 t{word}, t{word}, 2;"]
            text += [f"lop3.b32 t{word}, reached, 0x80808080, t{word}, 0xEA;"]
    # the bits of two lanes fill the gaps of each other
    text += ["selp.b32 x, ta, tc, late;", "selp.b32 other, tb, td, late;", "shr.u32 other, other, 1;"]
    text += ["or.b32 other, other, x;", "shfl.sync.bfly.b32 other, other, 2, 0x1f, 0xffffffff;"]
    text += ["selp.b32 a, tc, ta, late;", "selp.b32 b, td, tb, late;", "and.b32 c, other, 0xAAAAAAAA;"]
    text += ["shl.b32 d, other, 1;", "and.b32 d, d, 0xAAAAAAAA;"]
    for own, given in (("a", "c"), ("b", "d")):
        text += [f"@late shr.u32 {own}, {own}, 1;", f"@!late shr.u32 {given}, {given}, 1;"]
        text += [f"or.b32 {own}, {own}, {given};"]
    text += ["selp.b32 own, b, a, odd;", "selp.b32 other, a, b, odd;"]
    text += ["shfl.sync.bfly.b32 other, other, 1, 0x1f, 0xffffffff;"]
    text += ["selp.b32 $0, other, own, odd;", "selp.b32 $1, own, other, odd;", "}"]
    return "\n".join(text)


@gluon.constexpr_function
def place_of_key(number):
    """Return the bit of a word of `kept_bits` that says whether a thread's pair with key 8 i + 2 pair + j is kept, of
    the number 2 i + j: byte i % 2, j, bit 7 - i / 2 of it."""
    eight = number // 2
    return 16 * (eight % 2) + 8 * (number % 2) + 7 - eight // 2


@gluon.jit
def kept_bits(rows, pairs, first, head, offset, seed_lo, seed_hi, threshold, N: gl.constexpr):
    """Return words [64, 4] like those of `bits_of_block` for the pairs that dropout keeps, in the order of
    `place_of_key`. rows: queries [64, 4]; first: the number of the block's first sixteen keys; head: batch * num_heads
    + head."""
    ASM: gl.constexpr = keep_asm(N // 4)
    return gl.inline_asm_elementwise(
        ASM, "=&r,=&r" + ",r" * 16, [rows, pairs, first, head, offset, seed_lo, seed_hi, threshold],
        dtype=gl.int32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.constexpr_function
def keep_keys_asm():
    """Return assembly for which of a thread's pairs dropout keeps where rows are keys: sixteen queries in each of two
    keys.

    Eight lanes have the same queries, in the keys r and r + 8 of a sixteen. A counter gives the numbers of sixteen
    keys, so that each of the lanes makes those of two queries of its own, and then they give each other what is theirs:
    a transposition of eight lanes and eight places, by exchanges with the lanes 4, 8 and 16 further. Operands: two
    words as results, then keys, the pair and the first query, twice each, and the scalars of `kept_bits_of_keys`.
    """
    keys, pair, query, head, offset, low, high, least = range(2, 18, 2)
    rounds = 7
    text = ["{", ".reg .pred p;", ".reg .b32 lane, sixteen, first, found, given;"]
    text += [*keys_asm(f"${low}", f"${high}", rounds), *threshold_asm(f"${least}")]
    text += [f"and.b32 lane, ${keys}, 7;", f"shr.u32 sixteen, ${keys}, 4;", f"shl.b32 first, ${pair}, 1;"]
    text += ["shl.b32 x, lane, 3;", "add.u32 first, first, x;", f"add.u32 first, first, ${query};", "mov.b32 found, 0;"]
    for number in range(2):  # queries
        text += ["mov.b32 a, sixteen;", f"add.u32 row, first, {number};"]
        text += [*philox_asm(f"${head}", f"${offset}", rounds), *summand_asm()]
        for i, word in enumerate("abcd"):
            place = 4 * number + i
            text += [*reach_asm(word), f"shr.u32 reached, reached, {7 - place};"]
            text += [f"lop3.b32 found, reached, {0x01010101 << place}, found, 0xEA;"]
    for further, shift, kept in ((4, 8, 0x00FF00FF), (8, 1, 0x55555555), (16, 2, 0x33333333)):
        text += [f"shfl.sync.bfly.b32 given, found, {further}, 0x1f, 0xffffffff;"]
        text += [f"and.b32 x, lane, {further // 4};", "setp.ne.u32 p, x, 0;"]
        text += [f"@p shr.u32 given, given, {shift};", f"@!p shl.b32 given, given, {shift};"]
        text += [f"selp.b32 x, {kept}, {kept ^ 0xFFFFFFFF}, p;", "lop3.b32 found, given, x, found, 0xE2;"]
    return "\n".join([*text, "mov.b32 $0, found;", "shr.u32 $1, found, 16;", "}"])


@gluon.constexpr_function
def place_of_query(number):
    """Return the bit of a word of `kept_bits_of_keys` for a thread's query 8 i + 2 pair + j, of the number 2 i + j."""
    eight = number // 2
    return 8 * (eight % 2) + 4 * (number % 2) + 2 * (eight // 4) + eight // 2 % 2


@gluon.jit
def kept_bits_of_keys(keys, pairs, query, head, offset, seed_lo, seed_hi, threshold):
    """Return words [64, 4] of the pairs that dropout keeps, of 64 queries in the order of `place_of_query`.

    keys: their numbers [64, 4]; query: the first one's; head: batch * num_heads + head. Bits from 16 on say nothing.
    """
    ASM: gl.constexpr = keep_keys_asm()
    return gl.inline_asm_elementwise(
        ASM, "=&r,=&r" + ",r" * 16, [keys, pairs, query, head, offset, seed_lo, seed_hi, threshold],
        dtype=gl.int32, is_pure=True, pack=2,
    )  # fmt: skip

"""From words of four 8-bit numbers to operands in float16, in registers and without rounding.

Inline assembly keeps words together: a pair of e4m3 is converted by one instruction, and a byte of int8 becomes the low
bits of a float16 number between 1024 and 1279, of which 1152 is subtracted.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

COLUMNS_E4M3 = gl.constexpr("""{
.reg .b16 first, second;
mov.b32 {first, second}, $2;
cvt.rn.f16x2.e4m3x2 $0, first;
cvt.rn.f16x2.e4m3x2 $1, second;
}""")
COLUMNS_INT8 = gl.constexpr("""{
.reg .b32 bytes, bias;
mov.b32 bias, 0x64806480;
xor.b32 bytes, $2, 0x80808080;
prmt.b32 $0, bytes, 0x64646464, 0x4140;
prmt.b32 $1, bytes, 0x64646464, 0x4342;
sub.f16x2 $0, $0, bias;
sub.f16x2 $1, $1, bias;
}""")
KEYS_E4M3 = gl.constexpr("""{
.reg .b32 left, right;
.reg .b16 a, b, c, d;
prmt.b32 left, $4, $5, 0x5140;
prmt.b32 right, $4, $5, 0x7362;
mov.b32 {a, b}, left;
mov.b32 {c, d}, right;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
cvt.rn.f16x2.e4m3x2 $2, c;
cvt.rn.f16x2.e4m3x2 $3, d;
}""")
KEYS_INT8 = gl.constexpr("""{
.reg .b32 left, right, bias;
mov.b32 bias, 0x64806480;
prmt.b32 left, $4, $5, 0x5140;
prmt.b32 right, $4, $5, 0x7362;
xor.b32 left, left, 0x80808080;
xor.b32 right, right, 0x80808080;
prmt.b32 $0, left, 0x64646464, 0x4140;
prmt.b32 $1, left, 0x64646464, 0x4342;
prmt.b32 $2, right, 0x64646464, 0x4140;
prmt.b32 $3, right, 0x64646464, 0x4342;
sub.f16x2 $0, $0, bias;
sub.f16x2 $1, $1, bias;
sub.f16x2 $2, $2, bias;
sub.f16x2 $3, $3, bias;
}""")


@gluon.jit
def pairs_of_columns(words, INT8: gl.constexpr):
    """(numbers 0 and 1, numbers 2 and 3) of every word, as words of two float16."""
    ASM: gl.constexpr = COLUMNS_INT8 if INT8 else COLUMNS_E4M3
    return gl.inline_asm_elementwise(ASM, "=&r,=&r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def pairs_of_keys(even, odd, INT8: gl.constexpr):
    """(numbers 0, 1, 2, 3) of two keys' words, each a word of two float16: that of the even key and of the odd one."""
    ASM: gl.constexpr = KEYS_INT8 if INT8 else KEYS_E4M3
    return gl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r,r", [even, odd], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def halves(words):
    """[.., 2] of float16, of words [..]."""
    low = words.to(gl.int16).to(gl.float16, bitcast=True)
    high = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def keys_of(words, INT8: gl.constexpr, OPERAND: gl.constexpr):
    """K [W, keys, WIDTH] of words [W, keys, WIDTH / 64, 4, 4], its columns in the order that `column_of` says."""
    W: gl.constexpr = words.shape[0]
    KEYS: gl.constexpr = words.shape[1]
    PARTS: gl.constexpr = words.shape[2]
    low, high = pairs_of_columns(words, INT8)
    # [W, KEYS, part, lane, half of 16, 8] -> [W, KEYS, part, half, lane, 8]
    k = gl.reshape(halves(gl.join(low, high)), [W, KEYS, PARTS, 4, 2, 8])
    k = gl.reshape(gl.permute(k, (0, 1, 2, 4, 3, 5)), [W, KEYS, 64 * PARTS])
    return gl.convert_layout(k, OPERAND, assert_trivial=True)


@gluon.jit
def column_of(place):
    """The column of K that stands at a place of `keys_of`: a thread has 16 neighbouring ones, a product takes eight."""
    return place // 64 * 64 + place // 8 % 4 * 16 + place // 32 % 2 * 8 + place % 8


@gluon.jit
def values_of(words, INT8: gl.constexpr, OPERAND: gl.constexpr):
    """V^T [W, WIDTH_V, keys] of words [W, keys, 1, 8, WIDTH_V / 32], its rows in the order that `in_order` undoes."""
    W: gl.constexpr = words.shape[0]
    KEYS: gl.constexpr = words.shape[1]
    WORDS: gl.constexpr = words.shape[4]
    even, odd = gl.split(gl.permute(gl.reshape(words, [W, KEYS // 2, 2, 8, WORDS]), (0, 1, 3, 4, 2)))
    first, second, third, fourth = pairs_of_keys(even, odd, INT8)
    # [W, KEYS / 2, lane, column of a lane, 2]
    v = halves(gl.join(gl.join(first, third), gl.join(second, fourth)))
    v = gl.permute(gl.reshape(v, [W, KEYS // 2, 8, 4 * WORDS, 2]), (0, 3, 2, 1, 4))
    return gl.convert_layout(gl.reshape(v, [W, 32 * WORDS, KEYS]), OPERAND, assert_trivial=True)


@gluon.jit
def in_order(acc):
    """The second product [W, WIDTH_V, rows] as [W, rows, WIDTH_V], its columns in their own order."""
    W: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    ROWS: gl.constexpr = acc.shape[2]
    # [W, column of a lane, lane, ROWS]
    split = gl.reshape(acc, [W, WIDTH // 8, 8, ROWS])
    return gl.reshape(gl.permute(split, (0, 3, 2, 1)), [W, ROWS, WIDTH])

"""From the numbers of an 8-bit cache, and from queries, to float16: in registers, without rounding.

The compiler takes words of bytes apart one by one. Inline assembly keeps them together: pairs of e4m3 are converted by
one instruction, and bytes of int8 become the low bits of float16 numbers between 1024 and 1279, of which 1152 is
subtracted.
"""

import triton
import triton.language as tl

BIASED_FLOAT16 = tl.constexpr("""{
.reg .b32 flipped;
xor.b32 flipped, $2, 0x80808080;
prmt.b32 $0, flipped, 0x64646464, 0x4140;
prmt.b32 $1, flipped, 0x64646464, 0x4342;
}""")
BIASED_COLUMNS = tl.constexpr("""{
.reg .b32 high;
prmt.b32 high, $2, 0, 0x4341;
lop3.b32 $0, $2, 0x00ff00ff, 0x64806480, 0x6a;
xor.b32 $1, high, 0x64806480;
}""")
E4M3_COLUMNS = tl.constexpr("""{
.reg .b32 apart;
.reg .b16 even, odd;
prmt.b32 apart, $2, 0, 0x3120;
mov.b32 {even, odd}, apart;
cvt.rn.f16x2.e4m3x2 $0, even;
cvt.rn.f16x2.e4m3x2 $1, odd;
}""")

if triton.knobs.runtime.interpret:
    # the interpreter knows no inline assembly

    @triton.jit
    def biased_float16(numbers):
        """Return float16 numbers from int8: x + 1152."""
        biased = (numbers.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return biased.to(tl.float16, bitcast=True)

    @triton.jit
    def biased_columns(pairs):
        """Return the even and the odd columns, as float16: x + 1152."""
        even, odd = (pairs & 0xFF) ^ 0x6480, (pairs >> 8) ^ 0x6480
        return even.to(tl.float16, bitcast=True), odd.to(tl.float16, bitcast=True)

    @triton.jit
    def e4m3_columns(pairs):
        """Return the even and the odd columns, as float16."""
        even, odd = (pairs & 0xFF).to(tl.uint8), (pairs >> 8).to(tl.uint8)
        return (
            even.to(tl.float8e4nv, bitcast=True).to(tl.float16),
            odd.to(tl.float8e4nv, bitcast=True).to(tl.float16),
        )
else:

    @triton.jit
    def biased_float16(numbers):
        """Return float16 numbers from int8: x + 1152. Four take one exclusive or and two permutations of bytes."""
        return tl.inline_asm_elementwise(BIASED_FLOAT16, "=&r,=r,r", [numbers], dtype=tl.float16, is_pure=True, pack=4)

    @triton.jit
    def biased_columns(pairs):
        """Return the even and the odd columns, as float16: x + 1152. Two pairs take three instructions."""
        return tl.inline_asm_elementwise(
            BIASED_COLUMNS, "=&r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )

    @triton.jit
    def e4m3_columns(pairs):
        """Return the even and the odd columns, as float16. Two pairs take one permutation and two conversions."""
        return tl.inline_asm_elementwise(
            E4M3_COLUMNS, "=&r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def convert_to_float16(numbers):
    """Return the numbers of an 8-bit tile, exactly."""
    if numbers.dtype == tl.int8:
        return biased_float16(numbers) - 1152.0
    else:
        return numbers.to(tl.float16)


@triton.jit
def two_columns(pairs, INT8: tl.constexpr):
    """Return the even and the odd columns of a tile whose columns lie in pairs in 16 bits, as float16.

    As bytes, values would be loaded from shared memory one by one: the second product wants two keys next to each other
    in a register, and only elements of 16 bits are transposed on the way. Queries next to keys that are bytes would be
    loaded in halves, and moved together.
    """
    if INT8:
        even, odd = biased_columns(pairs)
        return even - 1152.0, odd - 1152.0
    else:
        return e4m3_columns(pairs)


@triton.jit
def fit_float16(q):
    """Return (q [BLOCK_M, WIDTH] as float16, [BLOCK_M] what each row is to be multiplied with)."""
    if q.dtype == tl.float16:
        return q, tl.full([q.shape[0]], 1.0, tl.float32)
    else:
        numbers = q.to(tl.float32)
        bits = tl.max(tl.abs(numbers), 1).to(tl.int32, bitcast=True)
        exponents = tl.maximum(bits >> 23, 14)  # biased by 127
        up = ((267 - exponents) << 23).to(tl.float32, bitcast=True)
        return (numbers * up[:, None]).to(tl.float16), ((exponents - 13) << 23).to(tl.float32, bitcast=True)

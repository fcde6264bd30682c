"""Masks and distances next to the scores that threads of a warpgroup have, in Gluon: device functions.

Numbers of a thread's rows are [64, 4] and scores are [64, N / 8, 4, 2], as kernels/hopper/common/rows.py has them. Rows
are queries and columns keys in the forward; in the backward, whose scores are transposed, it is the other way round.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.common.device_functions import pin
from blocktune.kernels.hopper.common.rows import broadcast_rows


@gluon.jit
def thread_positions(scores):
    """Return (row, pair) [64, 4]: of what a thread has of scores [64, N / 8, 4, 2] the row, and the keys 2 pair, 2 pair
    + 1 of every eight."""
    L: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(1, scores.type.layout))
    rows = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, L)), 1)
    pairs = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, L)), 0)
    return rows + pairs * 0, pairs + rows * 0


@gluon.jit
def numbers_of_keys(scores, EIGHT: gl.constexpr):
    """Return [1, N / 8, 1, 2]: EIGHT for every eight keys and one for the second key of a thread's pair, constants
    all."""
    L: gl.constexpr = scores.type.layout
    EIGHTS_L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    PAIR_L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, L)))
    eights = gl.arange(0, scores.shape[1], EIGHTS_L) * EIGHT
    eights = gl.expand_dims(gl.expand_dims(gl.expand_dims(eights, 0), 2), 3)
    pair = gl.arange(0, 2, PAIR_L)
    return eights + gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 0), 0), 0)


@gluon.jit
def bits_of_block(tile, column, rows, pairs, N: gl.constexpr):
    """Return words [64, 4] whose bit 2 i + j says whether a row sees key 8 i + 2 pair + j of the block from `column`
    on."""
    words = gl.load(tile + (column // 128 * 256 + rows * 4 + pairs))
    if N == 64:
        words = words >> (column // 64 % 2 * 16)
    return words


@gluon.jit
def values_of_block(tile, column, N: gl.constexpr, S_L: gl.constexpr):
    """Return the part [64, N] of an additive mask."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    sixteens = gl.expand_dims(gl.arange(0, N // 16, gl.SliceLayout(1, L)), 1)
    inside = gl.expand_dims(gl.arange(0, 1024, gl.SliceLayout(0, L)), 0)
    # [N / 16, 1024]: 16 keys of 64 rows, eight values of a thread side by side
    values = gl.load(tile + (column * 64 + sixteens * 1024 + inside))
    # sixteen keys | warp | lane / 4 | lane % 4 | + 8 keys | + 8 rows | pair
    values = gl.reshape(values, [N // 16, 4, 8, 4, 2, 2, 2])
    values = gl.reshape(gl.permute(values, (1, 5, 2, 0, 4, 3, 6)), [64, N])
    return gl.convert_layout(values, S_L)


@gluon.constexpr_function
def in_order(number):
    """Return the place of a thread's number in a word: its own."""
    return number


@gluon.constexpr_function
def select_asm(count, other, place):
    """Return assembly for `count` numbers of a thread, two of row r and two of row r + 8 in turns, or `other` where the
    bit of the row's word at their `place` is not set. Operands, `count` of each: results, numbers, words, of which the
    places 0 and 2 count."""
    text = ["{", ".reg .pred p;", ".reg .b32 bit;"]
    for row in range(2):
        for number in sorted(range(count // 2), key=place):  # seven bits in a row become predicates at once
            at = number // 2 * 4 + 2 * row + number % 2
            text += [f"and.b32 bit, ${2 * count + 2 * row}, {1 << place(number)};", "setp.ne.s32 p, bit, 0;"]
            text += [f"selp.f32 ${at}, ${count + at}, {other}, p;"]
    return "\n".join([*text, "}"])


@gluon.constexpr_function
def select_constraints(count):
    """Return the constraints of `select_asm`."""
    return ",".join(["=&f"] * count + ["f"] * count + ["r"] * count)


@gluon.jit
def where_set(words, numbers, OTHER: gl.constexpr, PLACE: gl.constexpr = in_order):
    """Return the numbers [64, N / 8, 4, 2] of whose pairs the words [64, 4] have the bit, and OTHER, a float as
    assembly has it, in the place of the rest. PLACE: where the bit of a thread's number lies."""
    COUNT: gl.constexpr = numbers.shape[1] * 4
    ASM: gl.constexpr = select_asm(COUNT, OTHER, PLACE)
    CONSTRAINTS: gl.constexpr = select_constraints(COUNT)
    return gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [numbers, broadcast_rows(words, numbers)], dtype=gl.float32, is_pure=True, pack=COUNT
    )


@gluon.jit
def alibi(scores, slope, distance, ONE_SIDE: gl.constexpr):
    """Return minus slope * |distance|, like the scores [64, N / 8, 4, 2]. distance [64, 4]: from a thread's first key
    to the row's place. ONE_SIDE: no row sees a key behind its place."""
    slope = pin(slope)  # its products with the constants below would be kept in registers
    keys = numbers_of_keys(scores, 8).to(gl.float32)
    distance = broadcast_rows(distance, scores)
    if ONE_SIDE:
        return slope * keys - slope * distance
    return -slope * gl.abs(distance - keys)


@gluon.jit
def as_float32(values):
    """Return values of a mask. Pairs of bfloat16 are taken apart by one instruction each."""
    if values.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=r,=r,r", [values], dtype=gl.float32, is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        return values.to(gl.float32)

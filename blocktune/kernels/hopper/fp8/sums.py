"""What the accumulators of the 8-bit Hopper forward leave to float32 sums, stretch by stretch of keys, in Gluon: device
functions of kernels/hopper/fp8/steps.py. The sums are in registers, or in shared memory where these do not suffice.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from blocktune.kernels.hopper.common.device_functions import in_register_order
from blocktune.kernels.hopper.common.rows import across, times_factor

NO_END = 1 << 30
"""Blocks of a stretch that no sequence fills."""
ONE_STRETCH_KEYS = 1024
"""Keys that one accumulator may add up, whatever its width."""


@gluon.constexpr_function
def stretch_of(block_n, width, one_stretch):
    """Blocks of keys that one accumulator adds up: all, where they are few (`ONE_STRETCH_KEYS`), otherwise 512 keys, or
    1024 where its sums are split.

    8-bit wgmma cuts off what is below 2^-13 of the largest number in a sum. What is lost of numbers with one sign grows
    with the keys that an accumulator has seen: on an H200 a quarter at 16,384, 0.7 % at 512 and 1.4 % at 1024. Then the
    sums of stretches take it over.
    """
    if one_stretch:
        return NO_END
    return (1024 if sums_are_split(width) else 512) // block_n


@gluon.constexpr_function
def is_one_stretch(stretch):
    """Whether no tile has more keys than one accumulator adds up."""
    return stretch == NO_END


@gluon.constexpr_function
def sums_are_shared(consumers, width):
    """Whether the sums of stretches are in shared memory: more than two warpgroups have no registers for them, nor have
    two whose accumulators take half of all."""
    return consumers > 2 or sums_are_split(width)


@gluon.constexpr_function
def sums_are_split(width):
    """Whether shared memory has room for 16 of the sums' 32 bits: what is rounded off stays in the accumulator."""
    return width > 128


@gluon.constexpr_function
def has_float32_sums(consumers, width):
    """Whether shared memory has a place for sums that is larger than the output's."""
    return sums_are_shared(consumers, width) and not sums_are_split(width)


@gluon.constexpr_function
def turn_asm(count):
    """Assembly for `count` registers each of an accumulator and of float32 sums: where a stretch begins, the sums are
    multiplied with what they are due and take the accumulator over, and this is multiplied with its row's factor; all
    of it is skipped, in one jump, by a warp that has nothing to do. Registers alternate two of row r and two of row
    r + 8. Operands: both as results and as arguments, what the sums are due, factors, and whether a stretch begins."""
    due, factor, begins = (place * count for place in (4, 5, 6))
    head = ["{", ".reg .pred p, q;", f"setp.ne.s32 q, ${begins}, 0;", f"setp.neu.or.f32 p, ${factor}, 0f3F800000, q;"]
    head += [f"setp.neu.or.f32 p, ${factor + 2}, 0f3F800000, p;", "vote.sync.any.pred p, p, 0xffffffff;"]
    head += ["@!p bra SKIP;", "@!q bra RESCALE;"]
    gather = [f"fma.rn.f32 ${count + i}, ${count + i}, ${due + i}, ${i};" for i in range(count)]
    rescale = [f"mul.f32 ${i}, ${i}, ${factor + i};" for i in range(count)]
    return "\n".join([*head, *gather, "RESCALE:", *rescale, "SKIP:", "}"])


@gluon.constexpr_function
def turn_constraints(count):
    return ",".join(["=f"] * 2 * count + [str(i) for i in range(2 * count)] + ["f"] * 2 * count + ["r"] * count)


@gluon.jit
def turned(acc, whole, due, factor, begins, O_L: gl.constexpr):
    """(accumulator, sums of all stretches) [64, WIDTH] before another product. due, factor: [64, 4]."""
    PER_THREAD: gl.constexpr = acc.shape[1] // 2
    ASM: gl.constexpr = turn_asm(PER_THREAD)
    CONSTRAINTS: gl.constexpr = turn_constraints(PER_THREAD)
    return gl.inline_asm_elementwise(
        ASM,
        CONSTRAINTS,
        [acc, whole, across(due, acc, O_L), across(factor, acc, O_L), begins.to(gl.int32)],
        dtype=(gl.float32, gl.float32),
        is_pure=False,
        pack=PER_THREAD,
    )


@gluon.jit
def loaded_as(memory, x):
    """What shared memory has for the registers of x."""
    return memory.load(x.type.layout)


@gluon.jit
def in_16_bits(x):
    """float32 as bfloat16, two numbers by one instruction. Triton's own conversion takes one each here, at an eighth of
    the rate."""
    ASM: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def in_32_bits(x):
    """bfloat16 as float32, by one instruction each."""
    ASM: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def kept_sums(memory, x):
    """The sums [WIDTH, 64] that shared memory has for the registers of x, as float32."""
    kept = loaded_as(memory, x)
    if sums_are_split(x.shape[0]):
        kept = in_32_bits(kept)
    return kept


@gluon.jit
def put_aside(memory, due, acc, first, O_L: gl.constexpr):
    """The accumulator of a stretch goes to the sums of those before it in shared memory [WIDTH, 64], or in their place
    if it is the first. Threads have their numbers side by side there and touch no others. Returns what the next stretch
    begins with: zeros, or what 16 bits do not hold."""
    # [WIDTH, 64]
    x = in_register_order(acc)
    if first:
        tma.store_wait(0)  # the output of the tile before has been in the same memory
    else:
        x += kept_sums(memory, x) * in_register_order(across(due, acc, O_L))
    if sums_are_split(acc.shape[1]):
        kept = in_16_bits(x)
        memory.store(kept)
        return gl.convert_layout(out_of_register_order(x - in_32_bits(kept)), O_L)
    else:
        memory.store(x)
        return gl.zeros([64, acc.shape[1]], gl.float32, O_L)


@gluon.jit
def brought_back(memory, due, acc, O_L: gl.constexpr):
    """The sums of all stretches, of which the last one is in an accumulator."""
    # [WIDTH, 64]
    x = in_register_order(acc)
    x += kept_sums(memory, x) * in_register_order(across(due, acc, O_L))
    return gl.convert_layout(out_of_register_order(x), O_L)


@gluon.jit
def out_of_register_order(x):
    """The way back of `in_register_order`."""
    HALF: gl.constexpr = x.shape[0]
    # column / 8 | warp | lane / 4 | lane % 4 | + 8 rows | pair
    x = gl.reshape(x, [HALF // 8, 4, 8, 4, 2, 2])
    return gl.reshape(gl.permute(x, (1, 4, 2, 0, 3, 5)), [64, HALF])


@gluon.jit
def no_stretches(WIDTH: gl.constexpr, SHARED: gl.constexpr, O_L: gl.constexpr):
    """The float32 sums of a tile that begins, as far as they are in registers."""
    if SHARED:
        return ()
    else:
        return (gl.zeros([64, WIDTH], gl.float32, O_L),)


@gluon.jit
def end_stretch(kept, due, acc, number, STRETCH: gl.constexpr, SHARED: gl.constexpr, O_L: gl.constexpr):
    """What stands before the scores beside the product of block `number`: with sums in shared memory the accumulator
    of the stretch that ends is put aside, while there are registers for it."""
    if SHARED and not is_one_stretch(STRETCH):
        ends = (number > 0) & (number % STRETCH == 0)
        if ends:
            acc = (put_aside(kept, due, acc[0], number == STRETCH, O_L),)
    return acc


@gluon.jit
def begin_stretch(whole, due, acc, factor, begins, SHARED: gl.constexpr, O_L: gl.constexpr):
    """What stands before a second product: sums in registers take over the accumulator where a stretch begins, and the
    accumulator is rescaled. Returns (whole, due, acc)."""
    if SHARED:
        rescaled = times_factor(acc[0], factor, O_L)
    else:
        rescaled, sums = turned(acc[0], whole[0], due, factor, begins, O_L)
        whole = (sums,)
    return whole, gl.where(begins, 1.0, due) * factor, (rescaled,)


@gluon.jit
def sum_of_stretches(kept, whole, due, acc, number, STRETCH: gl.constexpr, SHARED: gl.constexpr, O_L: gl.constexpr):
    """[64, WIDTH] of a tile whose last block was `number`, from the accumulator of the last stretch."""
    if not SHARED:
        return whole[0] * across(due, acc, O_L) + acc
    else:
        if not is_one_stretch(STRETCH):
            if number >= STRETCH:
                acc = brought_back(kept, due, acc, O_L)
        return acc

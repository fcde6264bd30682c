"""Promote the accumulators of the 8-bit Hopper forward to float32 every few blocks of keys, a stretch, in Gluon: device
functions of kernels/hopper/fp8/steps.py. The sums are in registers, or in shared memory where these do not suffice.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from blocktune.kernels.hopper.common.device_functions import in_register_order
from blocktune.kernels.hopper.common.rows import across
from blocktune.kernels.hopper.fp8.arguments import State

NO_END = 1 << 30
"""Blocks of a stretch that no sequence fills."""
STRETCH_KEYS = 1024
"""Keys that one accumulator may add up."""


@gluon.constexpr_function
def stretch_of(block_n, one_stretch):
    """Return the blocks of keys that one accumulator adds up: those of `STRETCH_KEYS`, or all where there are no more.

    8-bit wgmma cuts off what is below 2^-13 of the largest number in a sum. What is lost of numbers with one sign grows
    with the keys that an accumulator has seen: on an H200 a quarter at 16,384, 0.7 % at 512 and 1.4 % at 1024. Then the
    sums of stretches take it over.
    """
    return NO_END if one_stretch else STRETCH_KEYS // block_n


@gluon.constexpr_function
def is_one_stretch(stretch):
    """Return whether no tile has more keys than one accumulator adds up."""
    return stretch == NO_END


@gluon.constexpr_function
def sums_are_shared(consumers, width):
    """Return whether the sums of stretches are in shared memory: more than two warpgroups have no registers for them,
    nor have two whose accumulators take half of all."""
    return consumers > 2 or sums_are_split(width)


@gluon.constexpr_function
def sums_are_split(width):
    """Return whether shared memory has room for 16 of the sums' 32 bits: what is rounded off stays in the
    accumulator."""
    return width > 128


@gluon.constexpr_function
def has_float32_sums(consumers, width):
    """Return whether shared memory has a place for sums that is larger than the output's."""
    return sums_are_shared(consumers, width) and not sums_are_split(width)


@gluon.jit
def loaded_as(memory, x):
    """Return what shared memory has for the registers of x."""
    return memory.load(x.type.layout)


@gluon.jit
def in_16_bits(x):
    """Convert float32 to bfloat16, two numbers by one instruction. Triton's own conversion takes one each here, at an
    eighth of the rate."""
    ASM: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def in_32_bits(x):
    """Convert bfloat16 to float32, by one instruction each."""
    ASM: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def kept_sums(memory, x):
    """Return the sums [WIDTH, 64] that shared memory has for the registers of x, as float32."""
    kept = loaded_as(memory, x)
    if sums_are_split(x.shape[0]):
        kept = in_32_bits(kept)
    return kept


@gluon.jit
def put_aside(memory, due, acc, first, O_L: gl.constexpr):
    """Add the accumulator of a stretch to the sums of those before it in shared memory [WIDTH, 64], or store it there
    if it is the first. Threads have their numbers side by side there and touch no others. Return what the next stretch
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
    """Return the sums of all stretches, of which the last one is in an accumulator."""
    # [WIDTH, 64]
    x = in_register_order(acc)
    x += kept_sums(memory, x) * in_register_order(across(due, acc, O_L))
    return gl.convert_layout(out_of_register_order(x), O_L)


@gluon.jit
def out_of_register_order(x):
    """Undo `in_register_order`."""
    HALF: gl.constexpr = x.shape[0]
    # column / 8 | warp | lane / 4 | lane % 4 | + 8 rows | pair
    x = gl.reshape(x, [HALF // 8, 4, 8, 4, 2, 2])
    return gl.reshape(gl.permute(x, (1, 4, 2, 0, 3, 5)), [64, HALF])


@gluon.jit
def no_stretches(WIDTH: gl.constexpr, SHARED: gl.constexpr, O_L: gl.constexpr):
    """Return the float32 sums of a tile that begins, as far as they are in registers."""
    if SHARED:
        return ()
    else:
        return (gl.zeros([64, WIDTH], gl.float32, O_L),)


@gluon.jit
def end_stretch(kept, whole, state, none_due, first, SHARED: gl.constexpr, O_L: gl.constexpr):
    """Add the accumulator of a stretch to the sums of those before it, in registers or in shared memory. Return
    (whole, state) of the next stretch; none_due [64, 4]: ones."""
    if SHARED:
        begun = put_aside(kept, state.due, state.acc, first, O_L)
    else:
        whole = (whole[0] * across(state.due, state.acc, O_L) + state.acc,)
        begun = gl.zeros([64, state.acc.shape[1]], gl.float32, O_L)
    next_state = State(
        due=none_due, acc=begun, p=state.p, factor=state.factor, base=state.base, sums=state.sums
    )  # fmt: skip
    return whole, next_state


@gluon.jit
def sum_of_stretches(kept, whole, due, acc, number, STRETCH: gl.constexpr, SHARED: gl.constexpr, O_L: gl.constexpr):
    """Return [64, WIDTH] of a tile whose last block was `number`, from the accumulator of the last stretch."""
    if not SHARED:
        return whole[0] * across(due, acc, O_L) + acc
    else:
        if not is_one_stretch(STRETCH):
            if number >= STRETCH:
                acc = brought_back(kept, due, acc, O_L)
        return acc

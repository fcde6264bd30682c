"""A step of the 8-bit Hopper forward and what it is made of: device functions of kernels/hopper/fp8/warps.py.

What differs from kernels/hopper/forward/steps.py, whose functions are used wherever the element is of no account:

- Probabilities are 2^(score - maximum + SHIFT), since e4m3 has its steps of 6 to 12 % from 2^-6 to 448. The running
  maximum may be TAU too small, so that they reach 2^(SHIFT + TAU) = 256. Sums have the same factor, and a division
  removes it.
- The accumulator of the scores is the operand of the second product without any exchange between threads: `as_operand`
  names its keys in the order that kernels/hopper/fp8/transpose_values.py gave the values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from blocktune.kernels.hopper.common.device_functions import (
    advance,
    in_register_order,
    pin,
)
from blocktune.kernels.hopper.common.rows import across, beside, by_thread, thread_sum, times_factor
from blocktune.kernels.hopper.forward.bounds import hide
from blocktune.kernels.hopper.forward.steps import finished
from blocktune.kernels.hopper.fp8.rows import raised
from blocktune.kernels.hopper.fp8.slots import give_back, meet

NO_END = 1 << 30
"""Blocks of a stretch that no sequence fills."""


@gluon.constexpr_function
def stretch_of(block_n, width, seqlen_fits):
    """Blocks of keys that one accumulator adds up: 512 keys, 1024 where its sums are split; all where they are no more.

    8-bit wgmma cuts off what is below 2^-13 of the largest number in a sum. What is lost of numbers with one sign grows
    with the keys that an accumulator has seen: on an H200 a quarter at 16,384, 0.7 % at 512 and 1.4 % at 1024. Then the
    sums of stretches take it over.
    """
    return NO_END if seqlen_fits else stretch_keys(width) // block_n


@gluon.constexpr_function
def stretch_keys(width):
    return 1024 if sums_are_split(width) else 512


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


@gluon.jit
def scale_of(scales, stride_b, stride_h, batch, head):
    """The scale of a head; 1 without any."""
    if scales is None:
        return 1.0
    else:
        return gl.load(scales + batch * stride_b + head * stride_h)


@gluon.jit
def half_word(c, d):
    """Two float32 as e4m3, c in the lower byte."""
    ASM: gl.constexpr = "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ASM, "=h,f,f", [c, d], dtype=gl.uint16, is_pure=True, pack=1)


@gluon.jit
def whole_word(a, b, high):
    """Four e4m3 in a register, a in its lowest byte, and what `half_word` gave in its upper half. Nothing moves it up:
    ptxas lets no other instruction than a wgmma write registers that a wgmma in flight reads, nor any that will be read
    in their place in the next round, or it waits for each wgmma (C7513). Values of Triton's 8-bit type that are carried
    through a loop are taken apart and put together in every round: 176 instructions of 641."""
    ASM: gl.constexpr = "{ .reg .b16 low; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; mov.b32 $0, {low, $3}; }"
    return gl.inline_asm_elementwise(ASM, "=r,f,f,h", [a, b, high], dtype=gl.uint32, is_pure=False, pack=1)


@gluon.jit
def as_numbers(bytes_, dtype: gl.constexpr):
    return bytes_.to(dtype, bitcast=True)


@gluon.jit
def half_packed(p):
    """Probabilities [64, BLOCK_N / 8, 4, 2], of every four in the order of kernels/hopper/fp8/transpose_values.py
    two as they are and two as e4m3: three times [64, BLOCK_N / 16, 4]. No value leaves its thread."""
    ROWS: gl.constexpr = p.shape[0]
    HALF: gl.constexpr = p.shape[1] // 2
    # [64, BLOCK_N / 16, 4, 2]
    first, second = gl.split(gl.permute(gl.reshape(p, [ROWS, HALF, 2, 4, 2]), (0, 1, 3, 2, 4)))
    # [64, BLOCK_N / 16, 4]
    a, c = gl.split(first)
    b, d = gl.split(second)
    return a, b, half_word(c, d)


@gluon.jit
def packed(p):
    """What `half_packed` left, four in a register [64, BLOCK_N / 16, 4], once no product reads such registers."""
    a, b, high = p
    return whole_word(a, b, high)


@gluon.jit
def as_operand(words, dtype: gl.constexpr, P_L: gl.constexpr):
    """The four numbers of every register [64, BLOCK_N / 16, 4] as the operand of the second product."""
    ROWS: gl.constexpr = words.shape[0]
    KEYS: gl.constexpr = words.shape[1] * 16
    # [64, BLOCK_N / 16, 4, 2]: bytes 0 and 2, 1 and 3
    first = gl.join(words.to(gl.uint8), (words >> 16).to(gl.uint8))
    second = gl.join((words >> 8).to(gl.uint8), (words >> 24).to(gl.uint8))
    # [64, BLOCK_N]
    numbers = gl.reshape(gl.join(first, second), [ROWS, KEYS])
    return as_numbers(gl.convert_layout(numbers, P_L), dtype)


@gluon.jit
def queries(memory, IN_REGISTERS: gl.constexpr, S_L: gl.constexpr):
    """The queries of a warpgroup as an operand. In registers they leave shared memory to others, which the scores of
    64 keys would read through all the time that they take."""
    if IN_REGISTERS:
        return memory.load(gl.DotOperandLayout(0, S_L, 4))
    else:
        return memory


@gluon.jit
def scores(q, k_smem, slot, zeros):
    """Issues Q K^T [64, BLOCK_N]."""
    return warpgroup_mma(q, k_smem.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def add_values(p, v_smem, slot, acc, begins):
    """Issues acc += P V, or acc = P V where a stretch begins with nothing."""
    v = v_smem.index(slot).permute((1, 0))
    if sums_are_split(acc[0].shape[1]):
        return (warpgroup_mma(p, v, acc[0], is_async=True),)
    else:
        return (warpgroup_mma(p, v, acc[0], use_acc=not begins, is_async=True),)


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
def softmax(qk, base, sums, scale):
    """(`half_packed` probabilities, factor of older sums, base of the exponents, sums of probabilities)."""
    # [64, BLOCK_N / 8, 4, 2]
    s = by_thread(qk)
    # [64, 4]
    base, factor = raised(base, s, scale)
    # [64, BLOCK_N / 8, 4, 2]
    p = gl.exp2(s * scale - beside(base, s))
    return half_packed(p), factor, base, sums * factor + thread_sum(p)


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


@gluon.jit
def step(
    memory, kept, q, state, slot, phase, previous, column, number, mask, scale, no_acc,
    STRETCH: gl.constexpr, SHARED: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr, O_L: gl.constexpr,
):  # fmt: skip
    """The scores of one block beside the second product of the block before, and its softmax beside that product.

    kept: shared memory of the sums of all stretches, if they are there. number: of the block before among those of a
    tile; every STRETCH a product is the first one of an accumulator.
    state: sums of all stretches, if they are in registers, and the factor that they are due, the accumulator of this
    stretch, probabilities as `packed` made them, factor of the accumulator, running maximum, base and sums of the block
    before.
    """
    whole, due, acc, p, factor, base, sums = state
    dtype: gl.constexpr = memory.v.dtype
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 4)
    begins = number % STRETCH == 0
    acc = end_stretch(kept, due, acc, number, STRETCH, SHARED, O_L)
    # [64, BLOCK_N]
    qk_t = scores(q, memory.k[0], slot, no_acc)
    # [64, head_dim_v], beside the scores: rescale the accumulator, give the previous slot back
    whole, due, acc = begin_stretch(whole, due, acc, pin(factor), begins, SHARED, O_L)
    give_back(previous, OPTIONS.CONSUMERS)
    acc_t = add_values(as_operand(p, dtype, P_L), memory.v, slot, acc, begins)
    meet()
    # [64, BLOCK_N]: softmax, while the second product runs: beside it probabilities are converted as well
    qk = warpgroup_mma_wait(1, deps=(qk_t,))
    if OPTIONS.RIGHT and not OPTIONS.ALIGNED:
        last, first, highest = mask
        if column > highest:
            qk = hide(qk, last, first, column, True, False, S_L)
    p, factor, base, sums = softmax(qk, base, sums, scale)
    previous = slot + 0
    slot, phase = advance(slot, phase, OPTIONS.STAGES)
    # operands of the next step; also the branch that keeps the wait for the product below the softmax
    mbarrier.wait(memory.full.index(slot), phase)
    acc = finished(acc_t, 1)
    return (whole, due, acc, packed(p), factor, base, sums), slot, phase, previous

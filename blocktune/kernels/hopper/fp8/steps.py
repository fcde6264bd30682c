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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from blocktune.kernels.hopper.common.device_functions import pin
from blocktune.kernels.hopper.common.rows import broadcast_rows, by_thread, thread_sum, times_factor
from blocktune.kernels.hopper.common.sequences import hide
from blocktune.kernels.hopper.common.slots import next_slot
from blocktune.kernels.hopper.fp8.arguments import State
from blocktune.kernels.hopper.fp8.row_sums import add_up, as_numbers, joined
from blocktune.kernels.hopper.fp8.rows import raised
from blocktune.kernels.hopper.fp8.slots import give_back, meet


@gluon.jit
def scale_of(scales, stride_b, stride_h, batch, head):
    """Return the scale of a head; 1 without any."""
    if scales is None:
        return 1.0
    else:
        return gl.load(scales + batch * stride_b + head * stride_h)


@gluon.jit
def half_word(c, d):
    """Return two float32 as e4m3, c in the lower byte."""
    ASM: gl.constexpr = "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ASM, "=h,f,f", [c, d], dtype=gl.uint16, is_pure=True, pack=1)


@gluon.jit
def whole_word(a, b, high):
    """Return four e4m3 in a register, a in its lowest byte, and what `half_word` gave in its upper half. Nothing moves
    it up: ptxas lets no other instruction than a wgmma write registers that a wgmma in flight reads, nor any that will
    be read in their place in the next round, or it waits for each wgmma (C7513). Values of Triton's 8-bit type that are
    carried through a loop are taken apart and put together in every round: 176 instructions of 641."""
    ASM: gl.constexpr = "{ .reg .b16 low; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; mov.b32 $0, {low, $3}; }"
    return gl.inline_asm_elementwise(ASM, "=r,f,f,h", [a, b, high], dtype=gl.uint32, is_pure=False, pack=1)


@gluon.jit
def half_packed(p):
    """Return probabilities [64, BLOCK_N / 8, 4, 2], of every four in the order of
    kernels/hopper/fp8/transpose_values.py two as they are and two as e4m3: three times [64, BLOCK_N / 16, 4]. No value
    leaves its thread."""
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
    """Return what `half_packed` left, four in a register [64, BLOCK_N / 16, 4], once no product reads such
    registers."""
    a, b, high = p
    return whole_word(a, b, high)


@gluon.jit
def as_operand(words, dtype: gl.constexpr, P_L: gl.constexpr):
    """Return the four numbers of every register [64, BLOCK_N / 16, 4] as the operand of the second product."""
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
    """Return the queries of a warpgroup as an operand. In registers they leave shared memory to others, which the
    scores of 64 keys would read through all the time that they take."""
    if IN_REGISTERS:
        return memory.load(gl.DotOperandLayout(0, S_L, 4))
    else:
        return memory


@gluon.jit
def scores(q, k_smem, place, zeros):
    """Issue Q K^T [64, BLOCK_N]."""
    return warpgroup_mma(q, k_smem.index(place).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def add_values(p, memory, place, acc):
    """Issue acc += P V and, unless threads add them up, the sums of the rows of P: one product, or both."""
    acc = warpgroup_mma(p, memory.v.index(place).permute((1, 0)), acc, is_async=True)
    if memory.shares is None:
        return (acc,)
    else:
        return acc, add_up(p, memory.shares)


@gluon.jit
def finished(products, sums, factor, THREADS_ADD: gl.constexpr):
    """Return the accumulator and the sums of rows [64, 4], once no product is in flight. sums: of threads, or of the
    blocks before, still to be multiplied by the factor."""
    if THREADS_ADD:
        return warpgroup_mma_wait(0, deps=products), sums
    else:
        acc, added = warpgroup_mma_wait(0, deps=products)
        return acc, joined(sums, factor, added)


@gluon.jit
def rescaled(due, acc, factor, O_L: gl.constexpr):
    """Return what the sums of earlier stretches are due [64, 4], and the accumulator, times factors of rows [64, 4]."""
    return due * factor, times_factor(acc, factor, O_L)


@gluon.jit
def softmax(qk, base, sums, scale, THREADS_ADD: gl.constexpr):
    """Return (`half_packed` probabilities, factor of older sums, base of the exponents, sums of rows).

    THREADS_ADD: the sums are those of all blocks; otherwise `finished` adds this block's."""
    # [64, BLOCK_N / 8, 4, 2]
    s = by_thread(qk)
    # [64, 4]
    base, factor = raised(base, s, scale)
    # [64, BLOCK_N / 8, 4, 2]
    p = gl.exp2(s * scale - broadcast_rows(base, s))
    if THREADS_ADD:
        sums = sums * factor + thread_sum(p)
    return half_packed(p), factor, base, sums


@gluon.jit
def step(tile, state, slot, previous, column, OPTIONS: gl.constexpr, S_L: gl.constexpr, O_L: gl.constexpr):
    """Compute the scores of the block of keys from `column` on beside the second product of the block before, and its
    softmax beside that product. previous: the place of the slot that is given back. Return the new state, slot and
    previous place."""
    memory = tile.memory
    THREADS_ADD: gl.constexpr = memory.shares is None
    dtype: gl.constexpr = memory.v.dtype
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 4)
    # [64, BLOCK_N]
    qk_t = scores(tile.q, memory.k[0], slot.place, tile.no_acc)
    # [64, head_dim_v], beside the scores: rescale the accumulator, give the previous slot back
    due, acc = rescaled(state.due, state.acc, pin(state.factor), O_L)
    give_back(previous, OPTIONS.CONSUMERS)
    products = add_values(as_operand(state.p, dtype, P_L), memory, slot.place, acc)
    meet()
    # [64, BLOCK_N]: softmax, while the second product runs: beside it probabilities are converted as well
    qk = warpgroup_mma_wait(1 if THREADS_ADD else 2, deps=(qk_t,))
    if OPTIONS.RIGHT and not OPTIONS.ALIGNED:
        if column > tile.seen.highest:
            qk = hide(qk, tile.seen.rows, column, OPTIONS, S_L)
    p, factor, base, sums = softmax(qk, state.base, state.sums, tile.scale, THREADS_ADD)
    previous = slot.place + 0
    slot = next_slot(slot, OPTIONS.STAGES)
    # operands of the next step; also the branch that keeps the wait for the product below the softmax
    mbarrier.wait(memory.full.index(slot.place), slot.parity)
    acc, sums = finished(products, sums, state.factor, THREADS_ADD)
    return State(due=due, acc=acc, p=packed(p), factor=factor, base=base, sums=sums), slot, previous

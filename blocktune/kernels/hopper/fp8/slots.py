"""Who has the slots of keys and values of the 8-bit Hopper forward: device functions.

That a slot is full tells an mbarrier, whose bytes the copy engine counts. That it is empty again tells one of the
hardware's named barriers: at an mbarrier one thread arrives for its warpgroup, which has to wait for all four warps
before, and once more after it by Triton's rules. Here every warp arrives for itself and goes on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blocktune.kernels.hopper.common.device_functions import advance
from blocktune.kernels.hopper.common.named_barriers import bar_arrive, bar_sync

# Triton 3.9 renamed it: all threads of a warpgroup wait for each other.
meet = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def give_back(slot, CONSUMERS: gl.constexpr):
    """A consumer has no more use for a slot. Named barriers up to 7 are Triton's own."""
    bar_arrive(8 + slot, 128 * CONSUMERS + 32)


@gluon.jit
def await_slot(slot, CONSUMERS: gl.constexpr):
    """The producer's warp waits until all consumers have given a slot back."""
    bar_sync(8 + slot, 128 * CONSUMERS + 32)


@gluon.jit
def await_pass():
    """Waits until the kernel before, beside whose last programs this one may run, has written the values."""
    ASM: gl.constexpr = "griddepcontrol.wait; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(ASM, "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def announce(memory, slot, K_BYTES: gl.constexpr, V_BYTES: gl.constexpr):
    """The producer names the bytes that it copies into a slot. Returns the barriers of its keys and of its values: the
    same one, unless these are still to be transposed. Their own barrier completes in every use of a slot, with or
    without bytes, so that both sides count the same parities."""
    full = memory.full.index(slot)
    if memory.raw_full is None:
        mbarrier.expect(full, K_BYTES + V_BYTES)
        return full, full
    else:
        raw_full = memory.raw_full.index(slot)
        if K_BYTES > 0:
            mbarrier.expect(full, K_BYTES)
        else:
            mbarrier.arrive(full, count=1)
        if V_BYTES > 0:
            mbarrier.expect(raw_full, V_BYTES)
        else:
            mbarrier.arrive(raw_full, count=1)
        return full, raw_full


@gluon.jit
def following(slot, STAGES: gl.constexpr):
    slot += 1
    if slot == STAGES:
        slot = 0
    return slot


@gluon.jit
def hand_back(count, full, slot, phase, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Gives slots back unused. Each is awaited first: an arrival ahead of its turn would count for the slot's use
    before, which other warpgroups may not have finished."""
    for i in range(count):
        mbarrier.wait(full.index(slot), phase)
        give_back(slot, CONSUMERS)
        slot, phase = advance(slot, phase, STAGES)
    return slot, phase

"""Who has the slots of keys and values of the 8-bit Hopper forward: device functions.

That a slot is full tells an mbarrier, whose bytes the copy engine counts. That it is empty again tells one of the
hardware's named barriers: at an mbarrier one thread arrives for its warpgroup, which has to wait for all four warps
before, and once more after it by Triton's rules. Here every warp arrives for itself and goes on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blocktune.kernels.hopper.common.named_barriers import bar_arrive, bar_sync
from blocktune.kernels.hopper.common.slots import next_slot

# Triton 3.9 renamed it: all threads of a warpgroup wait for each other.
meet = getattr(gl, "barrier", None) or gl.thread_barrier

FIRST_BARRIER = gl.constexpr(8)
"""Named barriers up to 7 are Triton's own."""


@gluon.jit
def give_back(place, CONSUMERS: gl.constexpr):
    """Give a slot back that a consumer has no more use for."""
    bar_arrive(FIRST_BARRIER + place, 128 * CONSUMERS + 32)


@gluon.jit
def await_slot(place, CONSUMERS: gl.constexpr):
    """Let the producer's warp wait until all consumers have given a slot back."""
    bar_sync(FIRST_BARRIER + place, 128 * CONSUMERS + 32)


@gluon.jit
def await_pass():
    """Wait until the kernel before, beside whose last programs this one may run, has written the values."""
    ASM: gl.constexpr = "griddepcontrol.wait; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(ASM, "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def announce(memory, place, K_BYTES: gl.constexpr, V_BYTES: gl.constexpr):
    """Name the bytes that the producer copies into a slot. Return the barriers of its keys and of its values: the
    same one, unless these are still to be transposed. Their own barrier completes in every use of a slot, with or
    without bytes, so that both sides count the same parities."""
    full = memory.full.index(place)
    if memory.raw_full is None:
        mbarrier.expect(full, K_BYTES + V_BYTES)
        return full, full
    else:
        raw_full = memory.raw_full.index(place)
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
def next_place(place, STAGES: gl.constexpr):
    """Return the place of the slot after this one."""
    place += 1
    if place == STAGES:
        place = 0
    return place


@gluon.jit
def hand_back(count, memory, slot, OPTIONS: gl.constexpr):
    """Give slots back unused, and return the next one. Each is awaited first: an arrival ahead of its turn would count
    for the slot's use before, which other warpgroups may not have finished."""
    for i in range(count):
        mbarrier.wait(memory.full.index(slot.place), slot.parity)
        give_back(slot.place, OPTIONS.CONSUMERS)
        slot = next_slot(slot, OPTIONS.STAGES)
    return slot

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

"""Copies of the Hopper attention forward, and how its slots are given back, in Gluon.

Tiles of shared memory are a tuple: (tiles [count, rows, width],), or where the width is no power of two (96 and 192),
but three panels of W columns, (tiles [count, rows, 2 W], tiles [count, rows, W]): products take the first two panels
together and then the third. Copies move one panel at a time; a swizzle is as wide as one, so that a tile [rows, 2 W]
lies in memory as two of them do.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blocktune.kernels.hopper.common.device_functions import as_block, copy_in, reinterpret
from blocktune.kernels.hopper.common.head_rows import store_panel
from blocktune.kernels.hopper.common.slots import next_slot


@gluon.constexpr_function
def panels(memory):
    """Return how many copies a tile takes."""
    return 1 if len(memory) == 1 else 3


@gluon.jit
def panel(memory, place, PART: gl.constexpr):
    """Return what one copy moves of tile `place`."""
    if len(memory) == 1:
        return memory[0].index(place)
    elif PART == 2:
        return memory[1].index(place)
    else:
        both = memory[0].index(place)
        ROWS: gl.constexpr = both.shape[0]
        W: gl.constexpr = both.shape[1] // 2
        return reinterpret(both, both.dtype, [2, ROWS, W], both.layout).index(PART)


@gluon.jit
def load_rows(rows, row, barrier, memory, place):
    """Copy a tile of a head from `row` on into tile `place` of shared memory; zeros beyond the end.

    The end of a packed sequence is inside the tensor. Its descriptor (`describe_packed` in
    kernels/hopper/common/descriptors.py) has a dimension of 2^30 rows that ends where the sequence ends, so that the
    copy engine clips there, too.
    """
    desc = rows.desc
    W: gl.constexpr = desc.block_type.shape[len(desc.block_type.shape) - 1]
    for part in gl.static_range(panels(memory)):
        block = as_block(desc, panel(memory, place, part))
        if len(desc.block_type.shape) == 4:
            copy_in(desc, [rows.batch, rows.head, row, part * W], barrier, block)
        else:
            end = rows.begin + rows.length
            copy_in(desc, [1 << 30, end, rows.head, (1 << 30) - rows.length + row, part * W], barrier, block)


@gluon.jit
def store_rows(rows, row, memory, place):
    """Copy a tile back as `load_rows` brought it: what lies beyond the end is not written."""
    W: gl.constexpr = rows.desc.block_type.shape[len(rows.desc.block_type.shape) - 1]
    for part in gl.static_range(panels(memory)):
        store_panel(rows, row, part * W, panel(memory, place, part))


@gluon.jit
def release(memory, place, OPTIONS: gl.constexpr):
    """Give a whole slot back."""
    mbarrier.arrive(memory.k_empty.index(place), count=1)
    if OPTIONS.SPLIT_RELEASE:
        mbarrier.arrive(memory.v_empty.index(place), count=1)


@gluon.jit
def release_values(memory, place, OPTIONS: gl.constexpr):
    """Give a slot back whose V is read: all of it, or with separate releases what its K left."""
    if OPTIONS.SPLIT_RELEASE:
        mbarrier.arrive(memory.v_empty.index(place), count=1)
    else:
        mbarrier.arrive(memory.k_empty.index(place), count=1)


@gluon.jit
def hand_back(count, memory, slot, OPTIONS: gl.constexpr):
    """Give slots back unused, and return the next one. Each is awaited first: an arrival ahead of its turn would count
    for the slot's use before, which other warpgroups may not have finished."""
    for i in range(count):
        mbarrier.wait(memory.full.index(slot.place), slot.parity)
        release(memory, slot.place, OPTIONS)
        slot = next_slot(slot, OPTIONS.STAGES)
    return slot


@gluon.jit
def unseen_slots(blocks, ONE_RING: gl.constexpr):
    """Return how many slots are before the first step, or after the last one, of a warpgroup that sees fewer blocks
    than its tile. In one ring, one tile of these blocks is among its own: it is given back there."""
    if ONE_RING:
        return gl.maximum(2 * blocks - 1, 0)
    else:
        return blocks

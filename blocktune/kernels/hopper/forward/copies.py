"""Copies of the Hopper attention forward, and how its slots are given back, in Gluon.

Tiles of shared memory are a tuple: (tiles [count, rows, width],), or where the width is no power of two (96 and 192),
but three panels of W columns, (tiles [count, rows, 2 W], tiles [count, rows, W]): products take the first two panels
together and then the third. Copies move one panel at a time; a swizzle is as wide as one, so that a tile [rows, 2 W]
lies in memory as two of them do.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blocktune.kernels.hopper.common.device_functions import advance, as_block, copy_in, copy_out, reinterpret


@gluon.jit
def panel(memory, place, PART: gl.constexpr, PANELS: gl.constexpr):
    """What one copy moves of tile `place`."""
    if PANELS == 1:
        return memory[0].index(place)
    elif PART == 2:
        return memory[1].index(place)
    else:
        both = memory[0].index(place)
        ROWS: gl.constexpr = both.shape[0]
        W: gl.constexpr = both.shape[1] // 2
        return reinterpret(both, both.dtype, [2, ROWS, W], both.layout).index(PART)


@gluon.jit
def load_rows(
    desc, batch, head, row, begin, length, barrier, memory, place, PANELS: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """Copies a tile of a head from `row` on into tile `place` of shared memory; zeros beyond the end.

    The end of a packed sequence is inside the tensor. Its descriptor (`describe_packed` in
    kernels/hopper/common/descriptors.py) has a dimension of 2^30 rows that ends where the sequence ends, so that the
    copy engine clips there, too.
    """
    W: gl.constexpr = desc.block_type.shape[len(desc.block_type.shape) - 1]
    for part in gl.static_range(PANELS):
        block = as_block(desc, panel(memory, place, part, PANELS))
        if VARLEN:
            copy_in(desc, [1 << 30, begin + length, head, (1 << 30) - length + row, part * W], barrier, block)
        else:
            copy_in(desc, [batch, head, row, part * W], barrier, block)


@gluon.jit
def store_rows(
    desc, batch, head, row, begin, length, memory, place, PANELS: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """The way back of `load_rows`: what lies beyond the end is not written."""
    W: gl.constexpr = desc.block_type.shape[len(desc.block_type.shape) - 1]
    for part in gl.static_range(PANELS):
        store_panel(desc, batch, head, row, begin, length, part * W, panel(memory, place, part, PANELS), VARLEN)


@gluon.jit
def store_panel(desc, batch, head, row, begin, length, column, tile, VARLEN: gl.constexpr):
    """Copies a tile of shared memory to a head's rows from `row` and columns from `column` on."""
    if VARLEN:
        copy_out(desc, [1 << 30, begin + length, head, (1 << 30) - length + row, column], as_block(desc, tile))
    else:
        copy_out(desc, [batch, head, row, column], as_block(desc, tile))


@gluon.jit
def release(memory, slot, SPLIT_RELEASE: gl.constexpr):
    """Gives a whole slot back."""
    mbarrier.arrive(memory.k_empty.index(slot), count=1)
    if SPLIT_RELEASE:
        mbarrier.arrive(memory.v_empty.index(slot), count=1)


@gluon.jit
def values_read(memory, slot, SPLIT_RELEASE: gl.constexpr):
    """Gives a slot back whose V is read: all of it, or with separate releases what its K left."""
    if SPLIT_RELEASE:
        mbarrier.arrive(memory.v_empty.index(slot), count=1)
    else:
        mbarrier.arrive(memory.k_empty.index(slot), count=1)


@gluon.jit
def hand_back(count, memory, slot, phase, STAGES: gl.constexpr, SPLIT_RELEASE: gl.constexpr):
    """Gives slots back unused. Each is awaited first: an arrival ahead of its turn would count for the slot's use
    before, which other warpgroups may not have finished."""
    for i in range(count):
        mbarrier.wait(memory.full.index(slot), phase)
        release(memory, slot, SPLIT_RELEASE)
        slot, phase = advance(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def passed_over(blocks, ONE_RING: gl.constexpr):
    """How many slots are before the first step, or after the last one, of a warpgroup that sees fewer blocks than
    its tile. In one ring, one tile of these blocks is among its own: it is given back there."""
    if ONE_RING:
        return gl.maximum(2 * blocks - 1, 0)
    else:
        return blocks

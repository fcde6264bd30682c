"""The warp of the Hopper attention forward that copies tiles, in Gluon.

kernels/hopper/forward/consumer.py says why nothing hangs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blocktune.kernels.hopper.common.device_functions import locate
from blocktune.kernels.hopper.common.head_rows import HeadRows
from blocktune.kernels.hopper.common.sequences import key_range
from blocktune.kernels.hopper.common.slots import fetch, first_slot, next_slot, publish
from blocktune.kernels.hopper.forward.bounds import Walk, sequence_of, walk_start, walked
from blocktune.kernels.hopper.forward.copies import load_rows, panels


@gluon.jit
def next_live(tile, tensors, q_tiles, sizes, BLOCK_M: gl.constexpr, LONGEST_FIRST: gl.constexpr):
    """Return the tile itself if it has queries, or else the next one from the counter that has; beyond all tiles if
    none."""
    dead = True
    while (tile < q_tiles * sizes.batch_heads) & dead:
        m, batch_head = locate(tile, q_tiles, sizes.head_group, sizes.batch_heads, LONGEST_FIRST)
        batch = batch_head // sizes.num_heads
        dead = m * BLOCK_M >= gl.load(tensors.cu_q + batch + 1) - gl.load(tensors.cu_q + batch)
        if dead:
            tile = gl.atomic_add(tensors.counter, 1, sem="relaxed") + gl.num_programs(0)
    return tile


@gluon.constexpr_function
def tile_bytes(desc, tiles):
    """Return the bytes of a tile in the memory of such tiles."""
    return panels(tiles) * desc.block_type.nbytes


@gluon.jit
def load_first_keys(keys, row, memory, slot, OPTIONS: gl.constexpr):
    """Load what step 0 of a tile takes: K of its first block, alone."""
    mbarrier.wait(memory.k_empty.index(slot.place), slot.parity)
    if OPTIONS.SPLIT_RELEASE:
        mbarrier.wait(memory.v_empty.index(slot.place), slot.parity)
    full = memory.full.index(slot.place)
    mbarrier.expect(full, tile_bytes(keys.desc, memory.k))
    load_rows(keys, row, full, memory.k, slot.place)


@gluon.jit
def load_pairs(keys, values, walk, memory, slot, OPTIONS: gl.constexpr):
    """Load what steps 1 .. of a tile take: K of a block and V of the one before share a slot, and the last V has one
    alone. Return the next slot."""
    K_BYTES: gl.constexpr = tile_bytes(keys.desc, memory.k)
    V_BYTES: gl.constexpr = tile_bytes(values.desc, memory.v)
    for i in range(walk.last - walk.first):
        row = walked(walk, walk.start - 1 - i, OPTIONS) * OPTIONS.BLOCK_N
        values_row = walked(walk, walk.start - i, OPTIONS) * OPTIONS.BLOCK_N
        mbarrier.wait(memory.k_empty.index(slot.place), slot.parity)
        full = memory.full.index(slot.place)
        mbarrier.expect(full, K_BYTES + V_BYTES)
        load_rows(keys, row, full, memory.k, slot.place)
        if OPTIONS.SPLIT_RELEASE:
            mbarrier.wait(memory.v_empty.index(slot.place), slot.parity)
        load_rows(values, values_row, full, memory.v, slot.place)
        slot = next_slot(slot, OPTIONS.STAGES)
    mbarrier.wait(memory.k_empty.index(slot.place), slot.parity)
    if OPTIONS.SPLIT_RELEASE:
        mbarrier.wait(memory.v_empty.index(slot.place), slot.parity)
    full = memory.full.index(slot.place)
    mbarrier.expect(full, V_BYTES)
    row = walked(walk, walk.start - walk.last + walk.first, OPTIONS) * OPTIONS.BLOCK_N
    load_rows(values, row, full, memory.v, slot.place)
    return next_slot(slot, OPTIONS.STAGES)


@gluon.jit
def load_in_turns(keys, values, walk, memory, slot, OPTIONS: gl.constexpr):
    """Load what steps 1 .. of a tile take with one ring: K of a block, then V of the one before, and at last V of the
    first block. Return the next slot."""
    for i in range(walk.last - walk.first):
        row = walked(walk, walk.start - 1 - i, OPTIONS) * OPTIONS.BLOCK_N
        values_row = walked(walk, walk.start - i, OPTIONS) * OPTIONS.BLOCK_N
        slot = load_alone(keys, row, memory, memory.k, slot, OPTIONS)
        slot = load_alone(values, values_row, memory, memory.v, slot, OPTIONS)
    row = walked(walk, walk.start - walk.last + walk.first, OPTIONS) * OPTIONS.BLOCK_N
    return load_alone(values, row, memory, memory.v, slot, OPTIONS)


@gluon.jit
def load_alone(rows, row, memory, tiles, slot, OPTIONS: gl.constexpr):
    """Fill the next slot of the ring with a tile of K or V, once it is empty. Return the one after it."""
    mbarrier.wait(memory.k_empty.index(slot.place), slot.parity)
    full = memory.full.index(slot.place)
    mbarrier.expect(full, tile_bytes(rows.desc, tiles))
    load_rows(rows, row, full, tiles, slot.place)
    return next_slot(slot, OPTIONS.STAGES)


@gluon.jit
def producer(tensors, memory, diagonal, sizes, OPTIONS: gl.constexpr):
    """Copy Q, K and V of every tile of this block, and fetch its next tiles from the counter."""
    ROWS: gl.constexpr = 64
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    VARLEN: gl.constexpr = tensors.cu_q is not None
    LONGEST_FIRST: gl.constexpr = OPTIONS.RIGHT and not OPTIONS.LEFT
    counter, num_heads = tensors.counter, sizes.num_heads
    q_tiles = (sizes.seqlen_q + BLOCK_M - 1) // BLOCK_M
    slot = first_slot(1)
    q_parity = 1
    tile_slot = first_slot(1)
    tile = gl.program_id(0)
    if VARLEN:
        tile = next_live(tile, tensors, q_tiles, sizes, BLOCK_M, LONGEST_FIRST)
        tile_slot = publish(tile, memory.ring, tile_slot)
    while tile < q_tiles * sizes.batch_heads:
        m, batch_head = locate(tile, q_tiles, sizes.head_group, sizes.batch_heads, LONGEST_FIRST)
        batch = batch_head // num_heads
        head = batch_head % num_heads
        head_kv = head // sizes.group_size
        sequence = sequence_of(batch, tensors, sizes, OPTIONS.LOWER_RIGHT)
        queries = HeadRows(tensors.q, batch, head, sequence.begin_q, sequence.seqlen_q)
        keys = HeadRows(tensors.k, batch, head_kv, sequence.begin_k, sequence.seqlen_k)
        values = HeadRows(tensors.v, batch, head_kv, sequence.begin_k, sequence.seqlen_k)
        blocks = key_range(m * BLOCK_M, sequence, BLOCK_M, OPTIONS)
        start = walk_start(m * BLOCK_M, diagonal, blocks.last, BLOCK_M, OPTIONS)
        walk = Walk(blocks.first, blocks.last, start)
        row = start * OPTIONS.BLOCK_N
        if OPTIONS.SHARE_O:  # Q has to wait for the output of the tile before
            load_first_keys(keys, row, memory, slot, OPTIONS)
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(memory.q_empty.index(c), q_parity)
            q_full = memory.q_full.index(c)
            mbarrier.expect(q_full, tile_bytes(tensors.q, memory.q))
            load_rows(queries, m * BLOCK_M + c * ROWS, q_full, memory.q, c)
            if c == 0 and not OPTIONS.SHARE_O:  # right after the first Q
                load_first_keys(keys, row, memory, slot, OPTIONS)
        q_parity ^= 1
        slot = next_slot(slot, OPTIONS.STAGES)
        if not (LONGEST_FIRST or VARLEN):
            tile, tile_slot = fetch(counter, memory.ring, tile_slot)
        if OPTIONS.ONE_RING:
            slot = load_in_turns(keys, values, walk, memory, slot, OPTIONS)
        else:
            slot = load_pairs(keys, values, walk, memory, slot, OPTIONS)
        if VARLEN:  # tiles differ in length
            tile = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
            tile = next_live(tile, tensors, q_tiles, sizes, BLOCK_M, LONGEST_FIRST)
            tile_slot = publish(tile, memory.ring, tile_slot)
        elif LONGEST_FIRST:
            tile, tile_slot = fetch(counter, memory.ring, tile_slot)
    # the last block to finish leaves the counters at zero for the next launch
    done = gl.atomic_add(counter + 1, 1)
    if done == gl.num_programs(0) - 1:
        gl.atomic_xchg(counter, 0)
        gl.atomic_xchg(counter + 1, 0)

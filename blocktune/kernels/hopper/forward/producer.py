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
from blocktune.kernels.hopper.forward.bounds import Walk, blocks_of_part, key_part, sequence_of, walk_start, walked
from blocktune.kernels.hopper.forward.copies import load_block, load_rows, pages_of_block, rows_of_keys


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
    columns = tiles[0].shape[2] + (tiles[1].shape[2] if len(tiles) > 1 else 0)
    rank = len(desc.block_type.shape)
    copied = desc.block_type.shape[rank - 2] * desc.block_type.shape[rank - 1]
    return tiles[0].shape[1] * columns * desc.block_type.nbytes // copied


@gluon.jit
def load_first_keys(keys, row, memory, slot, OPTIONS: gl.constexpr):
    """Load what step 0 of a tile takes: K of its first block, alone."""
    pages = pages_of_block(keys, row, OPTIONS)
    mbarrier.wait(memory.k_empty.index(slot.place), slot.parity)
    if OPTIONS.SPLIT_RELEASE:
        mbarrier.wait(memory.v_empty.index(slot.place), slot.parity)
    full = memory.full.index(slot.place)
    mbarrier.expect(full, tile_bytes(keys.desc, memory.k))
    load_block(keys, row, pages, full, memory.k, slot.place, OPTIONS)


@gluon.jit
def load_pairs(keys, values, walk, memory, slot, OPTIONS: gl.constexpr):
    """Load what steps 1 .. of a tile take: K of a block and V of the one before share a slot, and the last V has one
    alone. Return the next slot."""
    K_BYTES: gl.constexpr = tile_bytes(keys.desc, memory.k)
    V_BYTES: gl.constexpr = tile_bytes(values.desc, memory.v)
    for i in range(walk.last - walk.first):
        row = walked(walk, walk.start - 1 - i, OPTIONS) * OPTIONS.BLOCK_N
        values_row = walked(walk, walk.start - i, OPTIONS) * OPTIONS.BLOCK_N
        pages = pages_of_block(keys, row, OPTIONS)
        mbarrier.wait(memory.k_empty.index(slot.place), slot.parity)
        full = memory.full.index(slot.place)
        mbarrier.expect(full, K_BYTES + V_BYTES)
        load_block(keys, row, pages, full, memory.k, slot.place, OPTIONS)
        pages = pages_of_block(values, values_row, OPTIONS)
        if OPTIONS.SPLIT_RELEASE:
            mbarrier.wait(memory.v_empty.index(slot.place), slot.parity)
        load_block(values, values_row, pages, full, memory.v, slot.place, OPTIONS)
        slot = next_slot(slot, OPTIONS.STAGES)
    mbarrier.wait(memory.k_empty.index(slot.place), slot.parity)
    if OPTIONS.SPLIT_RELEASE:
        mbarrier.wait(memory.v_empty.index(slot.place), slot.parity)
    full = memory.full.index(slot.place)
    mbarrier.expect(full, V_BYTES)
    row = walked(walk, walk.start - walk.last + walk.first, OPTIONS) * OPTIONS.BLOCK_N
    load_block(values, row, pages_of_block(values, row, OPTIONS), full, memory.v, slot.place, OPTIONS)
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
    pages = pages_of_block(rows, row, OPTIONS)
    mbarrier.wait(memory.k_empty.index(slot.place), slot.parity)
    full = memory.full.index(slot.place)
    mbarrier.expect(full, tile_bytes(rows.desc, tiles))
    load_block(rows, row, pages, full, tiles, slot.place, OPTIONS)
    return next_slot(slot, OPTIONS.STAGES)


@gluon.jit
def producer(tensors, memory, diagonal, sizes, OPTIONS: gl.constexpr):
    """Copy Q, K and V of every tile of this block, and fetch its next tiles from the counter."""
    ROWS: gl.constexpr = 64
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    VARLEN: gl.constexpr = tensors.cu_q is not None
    CACHED: gl.constexpr = tensors.lengths is not None
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
        m, place = locate(tile, q_tiles, sizes.head_group, sizes.batch_heads, LONGEST_FIRST)
        part = key_part(place, OPTIONS.KEY_PARTS)
        batch = part.batch_head // num_heads
        head = part.batch_head % num_heads
        head_kv = head // sizes.group_size
        sequence = sequence_of(batch, tensors, sizes, OPTIONS.LOWER_RIGHT)
        queries = HeadRows(tensors.q, batch, head, sequence.begin_q, sequence.seqlen_q)
        keys = rows_of_keys(tensors.k, batch, head_kv, sequence, sizes.k_rows, tensors, sizes)
        values = rows_of_keys(tensors.v, batch, head_kv, sequence, sizes.v_rows, tensors, sizes)
        blocks = key_range(m * BLOCK_M, sequence, BLOCK_M, OPTIONS)
        blocks = blocks_of_part(blocks, part.number, OPTIONS.KEY_PARTS)
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
        if not (LONGEST_FIRST or VARLEN or CACHED):
            tile, tile_slot = fetch(counter, memory.ring, tile_slot)
        if OPTIONS.ONE_RING:
            slot = load_in_turns(keys, values, walk, memory, slot, OPTIONS)
        else:
            slot = load_pairs(keys, values, walk, memory, slot, OPTIONS)
        if VARLEN:  # tiles differ in length
            tile = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
            tile = next_live(tile, tensors, q_tiles, sizes, BLOCK_M, LONGEST_FIRST)
            tile_slot = publish(tile, memory.ring, tile_slot)
        elif LONGEST_FIRST or CACHED:
            tile, tile_slot = fetch(counter, memory.ring, tile_slot)
    # the last block to finish leaves the counters at zero for the next launch
    done = gl.atomic_add(counter + 1, 1)
    if done == gl.num_programs(0) - 1:
        gl.atomic_xchg(counter, 0)
        gl.atomic_xchg(counter + 1, 0)

"""The warp of the Hopper attention forward that copies tiles, in Gluon.

kernels/hopper/forward/consumer.py says why nothing hangs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blocktune.kernels.hopper.common.device_functions import advance, locate
from blocktune.kernels.hopper.common.slots import fetch, publish
from blocktune.kernels.hopper.forward.bounds import key_range, sequence, walk_start, walked
from blocktune.kernels.hopper.forward.copies import load_rows


@gluon.jit
def next_live(
    tile, counter, cu_q, q_tiles, head_group, batch_heads, num_heads, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr
):
    """The tile itself if it has queries, or else the next one from the counter that has; beyond all tiles if none."""
    dead = True
    while (tile < q_tiles * batch_heads) & dead:
        m, batch_head = locate(tile, q_tiles, head_group, batch_heads, CAUSAL)
        batch = batch_head // num_heads
        dead = m * BLOCK_M >= gl.load(cu_q + batch + 1) - gl.load(cu_q + batch)
        if dead:
            tile = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
    return tile


@gluon.jit
def load_first_keys(keys, memory, slot, phase, K_BYTES: gl.constexpr, OPTIONS: gl.constexpr, VARLEN: gl.constexpr):
    """Step 0 of a tile: K of its first block, alone."""
    k_desc, batch, head_kv, row, begin, length = keys
    mbarrier.wait(memory.k_empty.index(slot), phase)
    if OPTIONS.SPLIT_RELEASE:
        mbarrier.wait(memory.v_empty.index(slot), phase)
    full = memory.full.index(slot)
    mbarrier.expect(full, K_BYTES)
    load_rows(k_desc, batch, head_kv, row, begin, length, full, memory.k, slot, OPTIONS.QK_PANELS, VARLEN)


@gluon.jit
def load_pairs(k_desc, v_desc, blocks, memory, slot, phase, OPTIONS: gl.constexpr, VARLEN: gl.constexpr):
    """Steps 1 .. of a tile: K of a block and V of the one before share a slot, and the last V has one alone."""
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    STAGES: gl.constexpr = OPTIONS.STAGES
    QK_PANELS: gl.constexpr = OPTIONS.QK_PANELS
    V_PANELS: gl.constexpr = OPTIONS.V_PANELS
    K_BYTES: gl.constexpr = QK_PANELS * k_desc.block_type.nbytes
    V_BYTES: gl.constexpr = V_PANELS * v_desc.block_type.nbytes
    batch, head, first, last, start, begin, length = blocks
    for i in range(last - first):
        row = walked(start - 1 - i, last, OPTIONS) * BLOCK_N
        values_row = walked(start - i, last, OPTIONS) * BLOCK_N
        mbarrier.wait(memory.k_empty.index(slot), phase)
        full = memory.full.index(slot)
        mbarrier.expect(full, K_BYTES + V_BYTES)
        load_rows(k_desc, batch, head, row, begin, length, full, memory.k, slot, QK_PANELS, VARLEN)
        if OPTIONS.SPLIT_RELEASE:
            mbarrier.wait(memory.v_empty.index(slot), phase)
        load_rows(v_desc, batch, head, values_row, begin, length, full, memory.v, slot, V_PANELS, VARLEN)
        slot, phase = advance(slot, phase, STAGES)
    mbarrier.wait(memory.k_empty.index(slot), phase)
    if OPTIONS.SPLIT_RELEASE:
        mbarrier.wait(memory.v_empty.index(slot), phase)
    full = memory.full.index(slot)
    mbarrier.expect(full, V_BYTES)
    row = walked(start - last + first, last, OPTIONS) * BLOCK_N
    load_rows(v_desc, batch, head, row, begin, length, full, memory.v, slot, V_PANELS, VARLEN)
    return advance(slot, phase, STAGES)


@gluon.jit
def load_in_turns(k_desc, v_desc, blocks, memory, slot, phase, OPTIONS: gl.constexpr, VARLEN: gl.constexpr):
    """Steps 1 .. of a tile with one ring: K of a block, then V of the one before, and at last V of the first block."""
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    batch, head, first, last, start, begin, length = blocks
    for i in range(last - first):
        keys = k_desc, batch, head, walked(start - 1 - i, last, OPTIONS) * BLOCK_N, begin, length
        values = v_desc, batch, head, walked(start - i, last, OPTIONS) * BLOCK_N, begin, length
        slot, phase = load_alone(keys, memory, memory.k, slot, phase, OPTIONS, VARLEN)
        slot, phase = load_alone(values, memory, memory.v, slot, phase, OPTIONS, VARLEN)
    values = v_desc, batch, head, walked(start - last + first, last, OPTIONS) * BLOCK_N, begin, length
    return load_alone(values, memory, memory.v, slot, phase, OPTIONS, VARLEN)


@gluon.jit
def load_alone(rows, memory, slots, slot, phase, OPTIONS: gl.constexpr, VARLEN: gl.constexpr):
    """Fills the next slot of the ring with a tile of K or V, once it is empty."""
    desc, batch, head, row, begin, length = rows
    mbarrier.wait(memory.k_empty.index(slot), phase)
    full = memory.full.index(slot)
    mbarrier.expect(full, desc.block_type.nbytes)
    load_rows(desc, batch, head, row, begin, length, full, slots, slot, 1, VARLEN)
    return advance(slot, phase, OPTIONS.STAGES)


@gluon.jit
def producer(q_desc, k_desc, v_desc, memory, counter, cu_q, cu_k, diagonal, sizes, OPTIONS: gl.constexpr):
    """Copies Q, K and V of every tile of this block, and fetches its next tiles from the counter."""
    ROWS: gl.constexpr = 64
    BLOCK_M: gl.constexpr = ROWS * OPTIONS.CONSUMERS
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    STAGES: gl.constexpr = OPTIONS.STAGES
    RIGHT: gl.constexpr = OPTIONS.RIGHT
    LEFT: gl.constexpr = OPTIONS.LEFT
    QK_PANELS: gl.constexpr = OPTIONS.QK_PANELS
    head_group = sizes.head_group
    batch_heads = sizes.batch_heads
    num_heads = sizes.num_heads
    VARLEN: gl.constexpr = cu_q is not None
    LONGEST_FIRST: gl.constexpr = RIGHT and not LEFT
    Q_BYTES: gl.constexpr = QK_PANELS * q_desc.block_type.nbytes
    K_BYTES: gl.constexpr = QK_PANELS * k_desc.block_type.nbytes
    q_tiles = (sizes.seqlen_q + BLOCK_M - 1) // BLOCK_M
    slot = 0
    phase = 1
    q_phase = 1
    tile_slot = 0
    tile_phase = 1
    tile = gl.program_id(0)
    if VARLEN:
        tile = next_live(tile, counter, cu_q, q_tiles, head_group, batch_heads, num_heads, BLOCK_M, LONGEST_FIRST)
        tile_slot, tile_phase = publish(tile, memory.ring, tile_slot, tile_phase)
    while tile < q_tiles * batch_heads:
        m, batch_head = locate(tile, q_tiles, head_group, batch_heads, LONGEST_FIRST)
        batch = batch_head // num_heads
        head = batch_head % num_heads
        head_kv = head // sizes.group_size
        if VARLEN:
            begin_q, begin_k, length_q, length_k, high, low = sequence(
                batch, sizes.right, sizes.left, cu_q, cu_k, OPTIONS.LOWER_RIGHT
            )
        else:
            begin_q, begin_k = 0, 0
            length_q, length_k, high, low = sizes.seqlen_q, sizes.seqlen_k, sizes.right, sizes.left
        first, last = key_range(m * BLOCK_M, length_q, length_k, high, low, BLOCK_M, BLOCK_N, RIGHT, LEFT)
        start = walk_start(m * BLOCK_M, diagonal, last, BLOCK_M, OPTIONS)
        keys = k_desc, batch, head_kv, start * BLOCK_N, begin_k, length_k
        if OPTIONS.SHARE_O:  # Q has to wait for the output of the tile before
            load_first_keys(keys, memory, slot, phase, K_BYTES, OPTIONS, VARLEN)
        for c in gl.static_range(OPTIONS.CONSUMERS):
            mbarrier.wait(memory.q_empty.index(c), q_phase)
            q_full = memory.q_full.index(c)
            mbarrier.expect(q_full, Q_BYTES)
            row = m * BLOCK_M + c * ROWS
            load_rows(q_desc, batch, head, row, begin_q, length_q, q_full, memory.q, c, QK_PANELS, VARLEN)
            if c == 0 and not OPTIONS.SHARE_O:  # right behind the first Q
                load_first_keys(keys, memory, slot, phase, K_BYTES, OPTIONS, VARLEN)
        q_phase ^= 1
        slot, phase = advance(slot, phase, STAGES)
        if not (LONGEST_FIRST or VARLEN):
            tile, tile_slot, tile_phase = fetch(counter, memory.ring, tile_slot, tile_phase)
        blocks = batch, head_kv, first, last, start, begin_k, length_k
        if OPTIONS.ONE_RING:
            slot, phase = load_in_turns(k_desc, v_desc, blocks, memory, slot, phase, OPTIONS, VARLEN)
        else:
            slot, phase = load_pairs(k_desc, v_desc, blocks, memory, slot, phase, OPTIONS, VARLEN)
        if VARLEN:  # tiles differ in length
            tile = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
            tile = next_live(tile, counter, cu_q, q_tiles, head_group, batch_heads, num_heads, BLOCK_M, LONGEST_FIRST)
            tile_slot, tile_phase = publish(tile, memory.ring, tile_slot, tile_phase)
        elif LONGEST_FIRST:
            tile, tile_slot, tile_phase = fetch(counter, memory.ring, tile_slot, tile_phase)
    # the last block to finish leaves the counters at zero for the next launch
    done = gl.atomic_add(counter + 1, 1)
    if done == gl.num_programs(0) - 1:
        gl.atomic_xchg(counter, 0)
        gl.atomic_xchg(counter + 1, 0)

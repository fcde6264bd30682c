"""How dQ of a step is added to the sums, in Gluon: by the warpgroup that has it, or by two warps of their own.

The two warps take the steps of a block in turns, and dQ of a step has memory of its own for each of them where that
fits: the warpgroups go on while it is added. In any order of additions that is all. In a fixed order they wait until
it is the tile's turn (turns.py). Warpgroups of wide heads add dQ themselves; in a fixed order the two warps tell them
when.

Barriers. The warpgroups fill a place in memory once its last addition has read it (`dq_empty`, one for each place).
They tell the warp whose step it is (`dq_full`, one for each warp and warpgroup): a warp that waited for the steps of
both could take one for the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from blocktune.kernels.hopper.backward.bounds import (
    block_at,
    bounds_of,
    count_key_tiles,
    head_row,
    listed_turn,
    locate_keys,
    query_range,
    rotated,
    sequence,
    walk_of,
    walks_back,
)
from blocktune.kernels.hopper.backward.form import (
    counts_all_tiles,
)
from blocktune.kernels.hopper.backward.turns import await_turn, let_warpgroups_add, pass_turn, turn_of
from blocktune.kernels.hopper.common.device_functions import add_out, in_register_order
from blocktune.kernels.hopper.common.slots import first_slot, receive


@gluon.jit
def add_dq(dq, dq_desc, dq_smem, row, W: gl.constexpr):
    """Adds this warpgroup's half of dQ of 64 queries from `row` on."""
    HALF: gl.constexpr = dq.shape[1]
    # [HALF, 64]
    x = in_register_order(dq)
    tma.store_wait(0)
    dq_smem.store(x)
    fence_async_shared()
    add_out(dq_desc, [(row // 64 * 2 + W) * HALF, 0], dq_smem)


@gluon.constexpr_function
def add_fours_asm():
    return "red.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;"


@gluon.jit
def add_fours(places, first, second, third, fourth):
    """Adds four numbers to float32 memory from each of `places` on, pointers to 16 bytes."""
    ASM: gl.constexpr = add_fours_asm()
    operands = [places.to(gl.int64, bitcast=True), first, second, third, fourth]
    gl.inline_asm_elementwise(ASM, "=r,l,f,f,f,f,~{memory}", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def add_dq_from_registers(dq, dq_sums, row, W: gl.constexpr):
    """Adds this warpgroup's half of dQ of 64 queries from `row` on, four numbers an instruction, to where `add_dq` adds
    them."""
    HALF: gl.constexpr = dq.shape[1]
    # [16 * HALF, + 8 rows, pair]
    x = gl.reshape(in_register_order(dq), [16 * HALF, 2, 2])
    # [16 * HALF]
    even, odd = gl.split(x)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    fours = gl.arange(0, 16 * HALF, first.type.layout) * 4
    add_fours(dq_sums + (row // 64 * 2 + W).to(gl.int64) * (64 * HALF) + fours, first, second, third, fourth)


@gluon.constexpr_function
def has_two_places(dq):
    """Whether there is memory for dQ of two steps on its way to the sums."""
    return dq.shape[0] == 4


@gluon.jit
def place_of(memory, b, W: gl.constexpr):
    """The place in memory of this warpgroup's dQ of a step. b: the buffer of dS of the same step."""
    TWO: gl.constexpr = has_two_places(memory.dq)
    return b * 2 + W if TWO else W


@gluon.jit
def await_place(memory, b, b_phase, W: gl.constexpr):
    """Until the place of a step is free: dQ of the step that filled it before has been added."""
    TWO: gl.constexpr = has_two_places(memory.dq)
    mbarrier.wait(memory.dq_empty.index(place_of(memory, b, W)), b_phase ^ 1 if TWO else 1 - b)


@gluon.jit
def hand_over(x, memory, b, b_phase, W: gl.constexpr, AWAIT: gl.constexpr = True):
    """Gives a half of dQ of a step, x [HALF, 64], to the warp that adds those of every second step, b.

    AWAIT: whether dK and dV of the tile before may still be on their way out of the same memory.
    """
    if AWAIT:
        tma.store_wait(0)  # dK and dV of the tile before leave from here, too
    await_place(memory, b, b_phase, W)
    memory.dq.index(place_of(memory, b, W)).store(x)
    fence_async_shared()
    mbarrier.arrive(memory.dq_full.index(b * 2 + W), count=1)


@gluon.jit
def await_last(memory, b, b_phase, W: gl.constexpr):
    """Until no dQ is left in this warpgroup's first place in memory. b, b_phase: of the step that comes next."""
    TWO: gl.constexpr = has_two_places(memory.dq)
    mbarrier.wait(memory.dq_empty.index(W), b_phase ^ (1 - b) if TWO else 1 - b)


@gluon.jit
def give_dq(dq, steps, row, b, b_phase, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Adds dQ of 64 queries to the sums, to their rows from `row` on, or gives it to the warp that adds.

    b, b_phase: the buffer of dS of the same step.
    """
    if OPTIONS.ADDERS:
        hand_over(in_register_order(dq), steps.memory, b, b_phase, W)
    elif steps.dq_sums is not None:
        add_dq_from_registers(dq, steps.dq_sums, row, W)
    else:
        add_dq(dq, steps.dq_desc, steps.memory.dq.index(W), row, W)


@gluon.jit
def add_halves(memory, dq_desc, block, phase, OWN: gl.constexpr):
    """Adds both warpgroups' halves of dQ of a block of queries, and gives their memory back."""
    ROWS: gl.constexpr = dq_desc.block_type.shape[0]
    FIRST: gl.constexpr = OWN * 2 if memory.dq.shape[0] == 4 else 0
    for half in gl.static_range(2):
        mbarrier.wait(memory.dq_full.index(OWN * 2 + half), phase)
        add_out(dq_desc, [(block * 2 + half) * ROWS, 0], memory.dq.index(FIRST + half))
    for half in gl.static_range(2):
        tma.store_wait(1 - half)
        mbarrier.arrive(memory.dq_empty.index(FIRST + half), count=1)


@gluon.jit
def adder(memory, dq_desc, ring, sizes, turns, OWN: gl.constexpr, WIDE: gl.constexpr, OPTIONS: gl.constexpr):
    """Adds dQ of every second step of this block to the sums, or has the warpgroups of WIDE heads add it; in a fixed
    order when it is the tile's turn.

    OWN: 0 for its first, third, ... step, 1 for the others.
    """
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    BLOCK_N: gl.constexpr = memory.k.shape[1 if WIDE else 0]
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    num_heads_kv, group_size, batch_heads = sizes.num_heads_kv, sizes.group_size, sizes.batch_heads
    key_tiles = count_key_tiles(seqlen_k, BLOCK_N, OPTIONS)
    others = OWN + 0  # steps of the other warp before the next own one: 0 or 1
    phase = 0
    tile_slot = first_slot(0)
    if counts_all_tiles(OPTIONS):
        tile, tile_slot = receive(ring, tile_slot)
    else:
        tile = gl.program_id(0)
    while tile < key_tiles * batch_heads:
        n, batch_head = locate_keys(tile, key_tiles, sizes.head_group, batch_heads, OPTIONS)
        back = walks_back(batch_head, sizes.head_group, batch_heads, OPTIONS)
        first = 0
        low = 0
        high = seqlen_q
        end = seqlen_q
        begin_q = 0
        if OPTIONS.GENERAL:
            begin_q, len_q = sequence(sizes.cu_q, batch_head // num_heads_kv, seqlen_q, OPTIONS)
            _begin_k, len_k = sequence(sizes.cu_k, batch_head // num_heads_kv, seqlen_k, OPTIONS)
            above, below = bounds_of(sizes.upper, sizes.lower, len_q, len_k, OPTIONS)
            first, low, high, end, seen = query_range(
                n * BLOCK_N, len_q, len_k, above, below, BLOCK_M, BLOCK_N, OPTIONS
            )
        elif OPTIONS.CAUSAL:
            first = n * BLOCK_N
        for member in range(group_size):
            row = head_row(
                batch_head, member, num_heads_kv, group_size, begin_q, seqlen_q, sizes.rows, BLOCK_M, True, OPTIONS
            )  # fmt: skip
            entries, low, high, end = walk_of(n, batch_head, member, low, high, end, sizes, BLOCK_M, OPTIONS)
            for step in range(first + others * BLOCK_M, end, 2 * BLOCK_M):
                at = rotated(step, n * BLOCK_N, low, high, OPTIONS)
                m = block_at(at, first, end, back, BLOCK_M, OPTIONS, entries)
                block = (row + m) // BLOCK_M
                if OPTIONS.ORDERED:
                    if OPTIONS.LISTED:
                        count = listed_turn(entries, at, sizes, BLOCK_M)
                    else:
                        count = turn_of(n, m, above, below, len_k, seen, back, BLOCK_M, BLOCK_N, OPTIONS)
                    await_turn(turns + block, count)
                if WIDE:
                    let_warpgroups_add(OWN)
                else:
                    add_halves(memory, dq_desc, block, phase, OWN)
                if OPTIONS.ORDERED:
                    pass_turn(turns + block, count)
                phase ^= 1
            others ^= (end - first) // BLOCK_M & 1
        tile, tile_slot = receive(ring, tile_slot)

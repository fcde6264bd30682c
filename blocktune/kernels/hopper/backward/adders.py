"""How dQ of a step is added to the sums, in Gluon: by the warpgroup that has it, or by two warps of their own.

The two warps take the steps of a block in turns, and dQ of a step has memory of its own for each of them where that
fits: the warpgroups go on while it is added. In any order of additions that is all. In a fixed order they wait until
it is the tile's turn (turns.py). Inputss of wide heads add dQ themselves; in a fixed order the two warps tell them
when.

Barriers. The warpgroups fill a place in memory once its last addition has read it (`dq_empty`, one for each place).
They tell the warp whose step it is (`dq_full`, one for each warp and warpgroup): a warp that waited for the steps of
both could take one for the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from blocktune.kernels.hopper.backward.barriers import let_warpgroups_add
from blocktune.kernels.hopper.backward.bounds import block_at, first_key_of, listed_turn, rotate, walk_of_head
from blocktune.kernels.hopper.backward.tiles import count_key_tiles, head_row, receive_first, tile_of_keys
from blocktune.kernels.hopper.backward.turns import await_turn, pass_turn, turn_of
from blocktune.kernels.hopper.common.device_functions import add_out, in_register_order
from blocktune.kernels.hopper.common.slots import first_slot, receive


@gluon.jit
def add_dq(dq, dq_desc, dq_smem, row, W: gl.constexpr):
    """Add this warpgroup's half of dQ of 64 queries from `row` on."""
    HALF: gl.constexpr = dq.shape[1]
    # [HALF, 64]
    x = in_register_order(dq)
    tma.store_wait(0)
    dq_smem.store(x)
    fence_async_shared()
    add_out(dq_desc, [(row // 64 * 2 + W) * HALF, 0], dq_smem)


@gluon.constexpr_function
def add_fours_asm():
    """Return assembly that adds four numbers to memory."""
    return "red.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;"


@gluon.jit
def add_fours(places, first, second, third, fourth):
    """Add four numbers to float32 memory from each of `places` on, pointers to 16 bytes."""
    ASM: gl.constexpr = add_fours_asm()
    operands = [places.to(gl.int64, bitcast=True), first, second, third, fourth]
    gl.inline_asm_elementwise(ASM, "=r,l,f,f,f,f,~{memory}", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def add_dq_from_registers(dq, dq_sums, row, W: gl.constexpr):
    """Add this warpgroup's half of dQ of 64 queries from `row` on, four numbers an instruction, to where `add_dq` adds
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


# ---- places of dQ in memory; ds: the `Slot` of dS of the same step


@gluon.jit
def dq_place(ds, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Return the place in memory of this warpgroup's dQ of a step."""
    return ds.place * 2 + W if OPTIONS.DQ_SLOTS == 2 else W


@gluon.jit
def await_place(memory, ds, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Wait until the place of a step is free: dQ of the step that filled it before has been added."""
    empty = memory.dq_empty.index(dq_place(ds, W, OPTIONS))
    mbarrier.wait(empty, ds.parity ^ 1 if OPTIONS.DQ_SLOTS == 2 else 1 - ds.place)


@gluon.jit
def await_last(memory, ds, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Wait until no dQ is left in this warpgroup's first place in memory. ds: of the step that comes next."""
    empty = memory.dq_empty.index(W)
    mbarrier.wait(empty, ds.parity ^ (1 - ds.place) if OPTIONS.DQ_SLOTS == 2 else 1 - ds.place)


@gluon.jit
def hand_over(x, memory, ds, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Give a half of dQ of a step, x [HALF, 64], to the warp that adds those of every second step."""
    await_place(memory, ds, W, OPTIONS)
    room = memory.dq.index(dq_place(ds, W, OPTIONS))
    if OPTIONS.TAIL:
        room = room.slice(0, x.shape[0], dim=0)
    room.store(x)
    fence_async_shared()
    mbarrier.arrive(memory.dq_full.index(ds.place * 2 + W), count=1)


@gluon.jit
def give_dq(dq, inputs, row, ds, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Add dQ of 64 queries to the sums, to their rows from `row` on, or give it to the warp that adds."""
    tensors, memory = inputs.tensors, inputs.memory
    if OPTIONS.ADDERS:
        x = in_register_order(dq)
        tma.store_wait(0)  # dK and dV of the tile before leave from here, too
        hand_over(x, memory, ds, W, OPTIONS)
    elif tensors.dq_sums is not None:
        add_dq_from_registers(dq, tensors.dq_sums, row, W)
    else:
        add_dq(dq, tensors.dq, memory.dq.index(W), row, W)


# ---- warps that add


@gluon.jit
def add_halves(memory, dq_desc, block, phase, OWN: gl.constexpr, OPTIONS: gl.constexpr):
    """Add both warpgroups' halves of dQ of a block of queries, and give their memory back."""
    ROWS: gl.constexpr = dq_desc.block_type.shape[0]
    FIRST: gl.constexpr = OWN * 2 if OPTIONS.DQ_SLOTS == 2 else 0
    for half in gl.static_range(2):
        mbarrier.wait(memory.dq_full.index(OWN * 2 + half), phase)
        room = memory.dq.index(FIRST + half)
        if OPTIONS.TAIL:
            for part in gl.static_range(1 if half else 64 // ROWS):
                add_out(dq_desc, [block * (64 + ROWS) + half * 64 + part * ROWS, 0], room.slice(part * ROWS, ROWS))
        else:
            add_out(dq_desc, [(block * 2 + half) * ROWS, 0], room)
    for half in gl.static_range(2):
        tma.store_wait(1 - half)
        mbarrier.arrive(memory.dq_empty.index(FIRST + half), count=1)


@gluon.jit
def adder(tensors, memory, sizes, OWN: gl.constexpr, OPTIONS: gl.constexpr):
    """Add dQ of every second step of this block to the sums, or have the warpgroups of wide heads add it; in a fixed
    order when it is the tile's turn.

    OWN: 0 for its first, third, ... step, 1 for the others.
    """
    BLOCK_M: gl.constexpr = OPTIONS.BLOCK_M
    key_tiles = count_key_tiles(sizes, OPTIONS)
    others = OWN + 0  # steps of the other warp before the next own one: 0 or 1
    phase = 0
    tile_slot = first_slot(0)
    number, tile_slot = receive_first(memory.ring, tile_slot, OPTIONS)
    while number < key_tiles * sizes.batch_heads:
        tile = tile_of_keys(number, key_tiles, tensors, sizes, OPTIONS)
        for member in range(sizes.group_size):
            row = head_row(tile, member, sizes.group_size, sizes, OPTIONS)
            walk = walk_of_head(tile, member, tensors, sizes, OPTIONS)
            for step in range(walk.first + others * BLOCK_M, walk.end, 2 * BLOCK_M):
                place = rotate(walk, step, first_key_of(tile, OPTIONS), OPTIONS)
                m = block_at(walk, place, OPTIONS)
                block = (row + m) // BLOCK_M
                if OPTIONS.ORDERED:
                    if OPTIONS.LISTED:
                        count = listed_turn(walk.entries, place, sizes, OPTIONS)
                    else:
                        count = turn_of(tile, m, OPTIONS)
                    await_turn(tensors.turns + block, count)
                if OPTIONS.PANELS > 1:
                    let_warpgroups_add(OWN)
                else:
                    add_halves(memory, tensors.dq, block, phase, OWN, OPTIONS)
                if OPTIONS.ORDERED:
                    pass_turn(tensors.turns + block, count)
                phase ^= 1
            others ^= (walk.end - walk.first) // BLOCK_M & 1
        number, tile_slot = receive(memory.ring, tile_slot)

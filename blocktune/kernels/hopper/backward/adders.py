"""How dQ of a step is added to the sums, in Gluon: by the warpgroup that has it, or by two warps of their own.

The two warps take the steps of a block in turns, and dQ of a step has memory of its own for each of them where that
fits: the warpgroups go on while it is added. In any order of additions that is all.

In a fixed order tiles of a head add their part of dq of a block of queries in turns. A turn is the number of tiles that
have added. Tiles are taken from the counter in this order, and a tile waits for those of its head alone that were taken
before it. The first unfinished tile of all therefore never waits for long: it is in work (its block took it, and every
tile before it in that block's queue is finished), and what it waits for is finished.

What makes it fast, and is easily lost when the code changes:

1. To await a turn, add, wait until the addition is complete and pass the turn on takes about as long as a step: one of
   the warps waits while the other one adds. (The warpgroups would wait in every step. A turn that is passed on one step
   later, when its additions are complete without a wait, is too late where all tiles begin with the same queries: on an
   H200 16 % slower with every key seen.)
2. Under a diagonal the tile of the last keys adds first, and walks begin at the diagonal. No other tile has to add to
   the two blocks of queries there before, and the next two follow when the tile taken earlier has long added to them:
   tiles that begin together never wait for one another. The longest tiles, of the first keys, come last, so half of one
   would stand between the first multiprocessor's end and the last one's, 3 to 6 % of a launch.
   (With the first keys first and walks that go back, tiles of a head that begin together meet at the last queries, and
   each waits for all before it: 4 to 10 % of the time at head_dim 64.)
3. Therefore the last group of heads has the other order (`goes_both_ways`): the first keys first, walks that go back.
   Its tiles do not begin together: a multiprocessor takes one when it has ended a tile of the group before, and these
   are of all lengths. More than the last group would wait.
4. Where every tile is seen by the last queries, the first keys add first, and a walk goes back (`goes_back`): the tiles
   of a head begin with the same block, and one that follows a step later never waits again. Tiles of several heads are
   taken in turns (`locate_keys`): few of those that begin together wait for one another.
5. Warpgroups of wide heads have memory for one panel of dQ and two panels in a step. They would wait for a warp that
   sees a panel, issues its copy and sees it read, so they issue the copies themselves. The two warps only tell them
   that it is their turn (`take_turn`), hear that both have added a step's panels (`report_added`), half a step later,
   when that is complete without a wait, and pass the turn on. Under a diagonal tiles of 64 keys that begin together are
   one block of queries apart, so a turn must be passed on within a step.

Barriers. The warpgroups fill a place in memory once its last addition has read it (`dq_empty`, one for each place).
They tell the warp whose step it is (`dq_full`, one for each warp and warpgroup): a warp that waited for the steps of
both could take one for the other. Those of wide heads are the hardware's: 10 .. 13 say whose turn it is, one for each
warp and warpgroup, 14 and 15 what was added, one for each warp. A warp goes on to its next step when both warpgroups
have arrived, so that nobody arrives at one of them twice before it opens.
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
    adds_apart,
    counts_all_tiles,
    goes_back,
    goes_both_ways,
    has_lower,
    is_general,
    is_listed,
    is_ordered,
)
from blocktune.kernels.hopper.common.device_functions import add_out, in_register_order
from blocktune.kernels.hopper.common.named_barriers import bar_arrive, bar_sync
from blocktune.kernels.hopper.common.slots import receive


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
    if adds_apart(OPTIONS.DEFER, OPTIONS.PERSISTENT, OPTIONS.CAUSAL, OPTIONS.FORM):
        hand_over(in_register_order(dq), steps.memory, b, b_phase, W)
    elif steps.dq_sums is not None:
        add_dq_from_registers(dq, steps.dq_sums, row, W)
    else:
        add_dq(dq, steps.dq_desc, steps.memory.dq.index(W), row, W)


@gluon.constexpr_function
def await_asm():
    return """{
.reg .pred p;
.reg .b32 found;
setp.lt.s32 p, $2, 0;
@p bra DONE;
AGAIN:
ld.acquire.gpu.global.b32 found, [$1];
setp.ne.s32 p, found, $2;
@p bra AGAIN;
DONE:
fence.proxy.async.global;
mov.b32 $0, $2;
}"""


@gluon.constexpr_function
def pass_asm():
    return """{
.reg .pred p, q;
cp.async.bulk.wait_group 0;
bar.warp.sync 0xffffffff;
elect.sync _|p, 0xffffffff;
setp.ge.s32 q, $2, 0;
and.pred p, p, q;
@p red.release.gpu.global.add.s32 [$1], 1;
mov.b32 $0, $2;
}"""


@gluon.jit
def await_turn(turn, count):
    """Until `count` tiles have been counted there; at once if it is negative."""
    ASM: gl.constexpr = await_asm()
    address = turn.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(ASM, "=r,l,r,~{memory}", [address, count], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(turn, count):
    """Counts a tile once the additions of this warp are complete in global memory, whichever lane issued them; does not
    if `count` is negative."""
    ASM: gl.constexpr = pass_asm()
    address = turn.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(ASM, "=r,l,r,~{memory}", [address, count], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def turn_of(
    n, m, upper, lower, len_k, seen, back, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, FORM: gl.constexpr
):  # fmt: skip
    """How many tiles have added to the queries from m on when it is tile n's turn: where walks go back those from the
    first one on that holds a key which query m sees, else from the last one on that holds a key which any of these
    queries sees. -1 where the tile adds only zeros. back: `walks_back` of the tile."""
    if goes_back(FORM):
        first = 0
        if has_lower(FORM):
            first = gl.maximum(m + lower, 0) // BLOCK_N
        turn = n - first
    else:
        turn = gl.minimum(m + BLOCK_M - 1 + upper, len_k - 1) // BLOCK_N - n
        if goes_both_ways(FORM):
            turn = gl.where(back, n, turn)
    return gl.where(seen, turn, -1)


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
def take_turn(parity, W: gl.constexpr):
    """Until it is the turn of this block to add what warpgroup W of a wide head has of a step. parity: of the step."""
    bar_sync(10 + parity * 2 + W, 160)


@gluon.constexpr_function
def report_asm():
    return """{
.reg .pred p;
setp.ne.s32 p, $2, 0;
@p cp.async.bulk.wait_group 0;
@p bar.arrive $1, 288;
mov.b32 $0, $1;
}"""


@gluon.jit
def report_added(parity, given):
    """Says that all a warpgroup of a wide head gave of a step is added, once that is complete in global memory; does
    not if `given` is 0. parity: of the step."""
    ASM: gl.constexpr = report_asm()
    gl.inline_asm_elementwise(ASM, "=r,r,r,~{memory}", [14 + parity, given], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_warpgroups_add(OWN: gl.constexpr):
    """Tells both warpgroups of a wide head that it is their turn to add a step, and waits until they have."""
    for warpgroup in gl.static_range(2):
        bar_arrive(10 + OWN * 2 + warpgroup, 160)
    bar_sync(14 + OWN, 288)


@gluon.jit
def adder(memory, dq_desc, ring, sizes, turns, OWN: gl.constexpr, WIDE: gl.constexpr, OPTIONS: gl.constexpr):
    """Adds dQ of every second step of this block to the sums, or has the warpgroups of WIDE heads add it; in a fixed
    order when it is the tile's turn.

    OWN: 0 for its first, third, ... step, 1 for the others.
    """
    FORM: gl.constexpr = OPTIONS.FORM
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    BLOCK_N: gl.constexpr = memory.k.shape[1 if WIDE else 0]
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    num_heads_kv, group_size, batch_heads = sizes.num_heads_kv, sizes.group_size, sizes.batch_heads
    key_tiles = count_key_tiles(seqlen_k, BLOCK_N, FORM)
    others = OWN + 0  # steps of the other warp before the next own one: 0 or 1
    phase = 0
    place = 0
    parity = 0
    if counts_all_tiles(FORM):
        tile, place, parity = receive(ring, place, parity)
    else:
        tile = gl.program_id(0)
    while tile < key_tiles * batch_heads:
        n, batch_head = locate_keys(tile, key_tiles, sizes.head_group, batch_heads, OPTIONS.CAUSAL, FORM)
        back = walks_back(batch_head, sizes.head_group, batch_heads, FORM)
        first = 0
        low = 0
        high = seqlen_q
        end = seqlen_q
        begin_q = 0
        if is_general(FORM):
            begin_q, len_q = sequence(sizes.cu_q, batch_head // num_heads_kv, seqlen_q, FORM)
            _begin_k, len_k = sequence(sizes.cu_k, batch_head // num_heads_kv, seqlen_k, FORM)
            above, below = bounds_of(sizes.upper, sizes.lower, len_q, len_k, FORM)
            first, low, high, end, seen = query_range(n * BLOCK_N, len_q, len_k, above, below, BLOCK_M, BLOCK_N, FORM)
        elif OPTIONS.CAUSAL:
            first = n * BLOCK_N
        for member in range(group_size):
            row = head_row(
                batch_head, member, num_heads_kv, group_size, begin_q, seqlen_q, sizes.rows, BLOCK_M, True, FORM
            )  # fmt: skip
            entries, low, high, end = walk_of(n, batch_head, member, low, high, end, sizes, BLOCK_M, FORM)
            for step in range(first + others * BLOCK_M, end, 2 * BLOCK_M):
                at = rotated(step, n * BLOCK_N, low, high, OPTIONS.CAUSAL, FORM)
                m = block_at(at, first, end, back, BLOCK_M, FORM, entries)
                block = (row + m) // BLOCK_M
                if is_ordered(FORM):
                    if is_listed(FORM):
                        count = listed_turn(entries, at, sizes, BLOCK_M)
                    else:
                        count = turn_of(n, m, above, below, len_k, seen, back, BLOCK_M, BLOCK_N, FORM)
                    await_turn(turns + block, count)
                if WIDE:
                    let_warpgroups_add(OWN)
                else:
                    add_halves(memory, dq_desc, block, phase, OWN)
                if is_ordered(FORM):
                    pass_turn(turns + block, count)
                phase ^= 1
            others ^= (end - first) // BLOCK_M & 1
        tile, place, parity = receive(ring, place, parity)

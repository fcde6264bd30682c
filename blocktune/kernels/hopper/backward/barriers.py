"""How the warps of the Hopper backward meet, in Gluon: at barriers in shared memory, or at the hardware's named ones.

An mbarrier's arrival costs one more barrier of the warpgroup (NAMED_EXCHANGE, NAMED_RELEASE). The hardware's numbers:

    8 .. 11   dS of warpgroup 0 and 1 in buffer 0 and 1; of warpgroups that share products: 8 P, 9 dS
    12 .. 15  the slots of Q and dO; with SHORT 15 is V, and there are fewer slots
    10 .. 13  of heads wider than 128 in a fixed order: whose turn it is, of each of two warps and each warpgroup
    14, 15    and what was added, of each warp
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blocktune.kernels.hopper.common.named_barriers import bar_arrive, bar_sync

EXCHANGE = gl.constexpr(8)
SLOTS = gl.constexpr(12)
VALUES = gl.constexpr(15)
TURNS = gl.constexpr(10)
ADDED = gl.constexpr(14)
WARP_AND_GROUP = gl.constexpr(160)
GROUPS = gl.constexpr(256)
WARP_AND_GROUPS = gl.constexpr(288)
"""Threads that meet: of a warp and of one or both of the warpgroups."""


@gluon.jit
def send_ds(memory, place, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Tell the other warpgroup that this one's half of dS is written."""
    if OPTIONS.NAMED_EXCHANGE:
        bar_arrive(EXCHANGE + 2 * W + place, GROUPS)
    else:
        mbarrier.arrive(memory.exchanged.index(place), count=1)


@gluon.jit
def await_ds(memory, ds, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Wait for the other warpgroup's half of dS."""
    if OPTIONS.NAMED_EXCHANGE:
        bar_sync(EXCHANGE + 2 * (1 - W) + ds.place, GROUPS)
    else:
        mbarrier.wait(memory.exchanged.index(ds.place), ds.parity)


@gluon.jit
def send(memory, NUMBER: gl.constexpr, OPTIONS: gl.constexpr):
    """Tell the warpgroup that shares the products that P (NUMBER 0) or dS (1) of this step is written."""
    if OPTIONS.NAMED_EXCHANGE:
        bar_arrive(EXCHANGE + NUMBER, GROUPS)
    else:
        mbarrier.arrive(memory.exchanged.index(NUMBER), count=1)


@gluon.jit
def await_product(memory, NUMBER: gl.constexpr, parity, OPTIONS: gl.constexpr):
    """Wait for P (NUMBER 0) or dS (1) of this step."""
    if OPTIONS.NAMED_EXCHANGE:
        bar_sync(EXCHANGE + NUMBER, GROUPS)
    else:
        mbarrier.wait(memory.exchanged.index(NUMBER), parity)


@gluon.jit
def release(memory, place, OPTIONS: gl.constexpr):
    """Give a slot of Q and dO back."""
    if OPTIONS.NAMED_RELEASE:
        bar_arrive(SLOTS + place, WARP_AND_GROUPS)
    else:
        mbarrier.arrive(memory.q_empty.index(place), count=1)


@gluon.jit
def await_named_release(place):
    """Wait until both warpgroups have given a slot back at a named barrier."""
    bar_sync(SLOTS + place, WARP_AND_GROUPS)


@gluon.constexpr_function
def give_values_asm(barrier, threads):
    """Return assembly that arrives at a named barrier where operand 1 is 1."""
    return f"{{ .reg .pred p; setp.eq.s32 p, $1, 1; @p bar.arrive {barrier}, {threads}; mov.b32 $0, $1; }}"


@gluon.jit
def give_values(left):
    """Tell the warp that copies that V has been read for the last time, in the last step of a tile."""
    ASM: gl.constexpr = give_values_asm(VALUES, WARP_AND_GROUPS)
    gl.inline_asm_elementwise(ASM, "=r,r,~{memory}", [left], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_values():
    """Wait until both warpgroups have given V."""
    bar_sync(VALUES, WARP_AND_GROUPS)


@gluon.jit
def take_turn(parity, W: gl.constexpr):
    """Wait for the turn of this block to add what warpgroup W of a wide head has of a step. parity: of the step."""
    bar_sync(TURNS + parity * 2 + W, WARP_AND_GROUP)


@gluon.constexpr_function
def report_asm(threads):
    """Return assembly that arrives at the named barrier of operand 1 once copies to global memory are complete; does
    not where operand 2 is 0."""
    return f"""{{
.reg .pred p;
setp.ne.s32 p, $2, 0;
@p cp.async.bulk.wait_group 0;
@p bar.arrive $1, {threads};
mov.b32 $0, $1;
}}"""


@gluon.jit
def report_added(parity, given):
    """Tell the warp whose step it is that all a warpgroup of a wide head gave of a step is added, once that is complete
    in global memory; do not if `given` is 0. parity: of the step."""
    ASM: gl.constexpr = report_asm(WARP_AND_GROUPS)
    gl.inline_asm_elementwise(ASM, "=r,r,r,~{memory}", [ADDED + parity, given], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_warpgroups_add(OWN: gl.constexpr):
    """Tell both warpgroups of a wide head that it is their turn to add a step, and wait until they have."""
    for warpgroup in gl.static_range(2):
        bar_arrive(TURNS + OWN * 2 + warpgroup, WARP_AND_GROUP)
    bar_sync(ADDED + OWN, WARP_AND_GROUPS)

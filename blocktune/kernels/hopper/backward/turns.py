"""The turns in which tiles of keys add to dq in a fixed order, in Gluon: device functions.

Tiles of a head add their part of dq of a block of queries in turns. A turn is the number of tiles that have added.
Tiles are taken from the counter in this order, and a tile waits for those of its head alone that were taken before it.
The first unfinished tile of all therefore never waits for long: it is in work (its block took it, and every
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
3. Therefore the last group of heads has the other order (BOTH_WAYS): the first keys first, walks that go back.
   Its tiles do not begin together: a multiprocessor takes one when it has ended a tile of the group before, and these
   are of all lengths. More than the last group would wait.
4. Where every tile is seen by the last queries, the first keys add first, and a walk goes back (BACK): the tiles
   of a head begin with the same block, and one that follows a step later never waits again. Tiles of several heads are
   taken in turns (`locate_keys`): few of those that begin together wait for one another.
5. Warpgroups of wide heads have memory for one panel of dQ and two panels in a step. They would wait for a warp that
   sees a panel, issues its copy and sees it read, so they issue the copies themselves. The two warps only tell them
   that it is their turn (`take_turn`), hear that both have added a step's panels (`report_added`), half a step later,
   when that is complete without a wait, and pass the turn on. Under a diagonal tiles of 64 keys that begin together are
   one block of queries apart, so a turn must be passed on within a step.

A warp of a wide head goes on to its next step when both warpgroups have arrived (barriers.py), so no warp arrives at a
barrier twice before it opens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def await_asm():
    """Return assembly that waits until memory at operand 1 has the number of operand 2, unless that is negative."""
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
    """Return assembly that adds 1 to memory at operand 1 once copies are complete, unless operand 2 is negative."""
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
    """Wait until `count` tiles have been counted there; do not if it is negative."""
    ASM: gl.constexpr = await_asm()
    address = turn.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(ASM, "=r,l,r,~{memory}", [address, count], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(turn, count):
    """Count a tile once the additions of this warp are complete in global memory, whichever lane issued them; do not if
    `count` is negative."""
    ASM: gl.constexpr = pass_asm()
    address = turn.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(ASM, "=r,l,r,~{memory}", [address, count], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def turn_of(tile, m, OPTIONS: gl.constexpr):
    """Return how many tiles have added to the queries from m on when it is this one's turn: where walks go back those
    from the first one on that holds a key which query m sees, else from the last one on that holds a key which any of
    these queries sees. -1 where the tile adds only zeros."""
    sequence = tile.sequence
    if OPTIONS.BACK:
        first = 0
        if OPTIONS.LEFT:
            first = gl.maximum(m + sequence.left, 0) // OPTIONS.BLOCK_N
        turn = tile.n - first
    else:
        last = gl.minimum(m + OPTIONS.BLOCK_M - 1 + sequence.right, sequence.seqlen_k - 1) // OPTIONS.BLOCK_N
        turn = last - tile.n
        if OPTIONS.BOTH_WAYS:
            turn = gl.where(tile.walk.back, tile.n, turn)
    return gl.where(tile.seen, turn, -1)

"""Two warps that make the values of an 8-bit attention what its second product takes, in Gluon: device functions.

They wait for each tile of values that the copy engine brings, transpose it where it stands
(kernels/hopper/fp8/turn_values.py) or widen it to float16 (kernels/hopper/fp8/widen_values.py), and say that it is full.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blocktune.kernels.hopper.common.device_functions import advance, as_block, copy_in, locate, reinterpret
from blocktune.kernels.hopper.forward.bounds import key_range
from blocktune.kernels.hopper.fp8.turn_values import UNIT_DIMS, UNIT_KEYS, turn_tile
from blocktune.kernels.hopper.fp8.widen_values import widen_tile

@gluon.jit
def values(
    dtype: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, COPIED: gl.constexpr,
    TURNS: gl.constexpr, WIDENS: gl.constexpr,
):  # fmt: skip
    """Shared memory of values as the second product takes them, transposed [STAGES, WIDTH, BLOCK_N] or widened
    [STAGES, BLOCK_N, WIDTH], and as they are copied, to the last bytes of the same memory."""
    if WIDENS:
        WIDE: gl.constexpr = gl.NVMMASharedLayout(min(2 * WIDTH, 128), element_bitwidth=16, rank=2)
        wide = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_N, WIDTH], WIDE)
        return wide, reinterpret(wide, dtype, [2 * STAGES, BLOCK_N, WIDTH], COPIED)
    elif TURNS:
        DIMS: gl.constexpr = min(WIDTH, UNIT_DIMS)
        copied = gl.allocate_shared_memory(dtype, [STAGES, WIDTH * BLOCK_N // DIMS, DIMS], COPIED)
        TURNED: gl.constexpr = gl.NVMMASharedLayout(UNIT_KEYS, element_bitwidth=8, rank=2)
        turned = reinterpret(copied, dtype, [STAGES, WIDTH, BLOCK_N], TURNED)
        return turned, turned
    else:
        turned = gl.allocate_shared_memory(dtype, [STAGES, WIDTH, BLOCK_N], COPIED)
        return turned, turned


@gluon.jit
def as_copied(memory, place, OPTIONS: gl.constexpr):
    """Tile `place` of values as it is copied."""
    if OPTIONS.WIDENS:
        return memory.raw.index(2 * place + 1)
    else:
        return memory.raw.index(place)


@gluon.jit
def load_values(desc, batch, head, key, barrier, memory, place, OPTIONS: gl.constexpr):
    """Copies keys key .. of all dimensions of a head into tile `place` of values; zeros beyond the last."""
    tile = as_copied(memory, place, OPTIONS)
    if memory.raw_full is None:
        copy_in(desc, [batch, head, 0, key], barrier, as_block(desc, tile))
    else:
        ROWS: gl.constexpr = desc.block_type.shape[2]
        BLOCKS: gl.constexpr = OPTIONS.BLOCK_N // ROWS
        blocks = reinterpret(tile, tile.dtype, [BLOCKS, ROWS, OPTIONS.WIDTH], tile.layout)
        for part in gl.static_range(BLOCKS):
            copy_in(desc, [batch, head, key + part * ROWS, 0], barrier, as_block(desc, blocks.index(part)))


@gluon.jit
def received(ring, place, parity, READIERS: gl.constexpr):
    """`receive` of kernels/hopper/common/slots.py for these warps."""
    mbarrier.wait(ring.full.index(place), parity)
    tile = ring.numbers.index(place).load(gl.BlockedLayout([1], [32], [READIERS], [0])).item()
    mbarrier.arrive(ring.empty.index(place), count=1)
    place, parity = advance(place, parity, 2)
    return tile, place, parity


@gluon.jit
def readier(memory, sizes, OPTIONS: gl.constexpr):
    """Makes the values of every tile of this block ready, unless they come transposed."""
    if memory.raw_full is not None:
        ready_slots(memory, sizes, OPTIONS)


@gluon.jit
def ready_slots(memory, sizes, OPTIONS: gl.constexpr):
    """Works slot by slot, and says of each that it is full: of the first of a tile, which has no values, as
    well."""
    BLOCK_M: gl.constexpr = 64 * OPTIONS.CONSUMERS
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    RIGHT: gl.constexpr = OPTIONS.RIGHT
    seqlen_q, batch_heads = sizes.seqlen_q, sizes.batch_heads
    q_tiles = (seqlen_q + BLOCK_M - 1) // BLOCK_M
    slot = 0
    phase = 0
    tile_slot = 0
    tile_phase = 0
    tile = gl.program_id(0)
    while tile < q_tiles * batch_heads:
        m, _ = locate(tile, q_tiles, sizes.head_group, batch_heads, RIGHT)
        first, last = key_range(m * BLOCK_M, seqlen_q, sizes.seqlen_k, sizes.right, 0, BLOCK_M, BLOCK_N, RIGHT, False)
        for i in range(last - first + 2):
            mbarrier.wait(memory.raw_full.index(slot), phase)
            if i > 0:
                if OPTIONS.WIDENS:
                    widen_tile(as_copied(memory, slot, OPTIONS), memory.v.index(slot), OPTIONS.READIERS)
                else:
                    turn_tile(memory.v.index(slot), OPTIONS.READIERS)
                fence_async_shared()
            mbarrier.arrive(memory.full.index(slot), count=1)
            slot, phase = advance(slot, phase, OPTIONS.STAGES)
        tile, tile_slot, tile_phase = received(memory.ring, tile_slot, tile_phase, OPTIONS.READIERS)

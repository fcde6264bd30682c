"""Values that two warps transpose in shared memory, for the 8-bit Hopper forward, in Gluon: device functions.

They come as they are, [keys, dims], and products want them as kernels/hopper/fp8/transpose_values.py writes them:
[dims, keys] with the keys of every 16 in another order. A unit of 32 keys of at most 128 dims lies in contiguous memory
before and after: rows of a swizzle's width before, a panel of 32 bytes a row after. So a unit is transposed where it
stands, through at most 16 registers a thread: `ldmatrix` transposes pairs of dims, byte permutations take the pairs
apart, and `stmatrix` writes words of the four keys that a thread of the products wants together.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blocktune.kernels.hopper.common.device_functions import as_block, copy_in, locate, reinterpret
from blocktune.kernels.hopper.common.sequences import key_range, whole_sequence
from blocktune.kernels.hopper.common.slots import first_slot, next_slot, receive

TURNERS = gl.constexpr(2)
"""Warps that transpose."""
UNIT_KEYS = gl.constexpr(32)
"""Keys of a unit, and bytes of a row of what it becomes."""
UNIT_DIMS = gl.constexpr(128)
"""Dims of a unit at most: the copy engine's widest swizzle."""


@gluon.constexpr_function
def unit_layout(pairs):
    """Return the registers of a unit [32 keys, pairs of dims]: a word has two neighbouring keys, and its thread the
    word eight keys on as well."""
    registers = [[1, 0], [8, 0], [16, 0], *([0, 2**i] for i in range(3, (pairs // 2).bit_length() - 1))]
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, pairs // 2]], [], [32, pairs])


@gluon.jit
def values(
    dtype: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, COPIED: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """Allocate shared memory of transposed values [STAGES, WIDTH, BLOCK_N], with the alignment of what is copied
    there."""
    if TURNS:
        DIMS: gl.constexpr = min(WIDTH, UNIT_DIMS)
        copied = gl.allocate_shared_memory(dtype, [STAGES, WIDTH * BLOCK_N // DIMS, DIMS], COPIED)
        TURNED: gl.constexpr = gl.NVMMASharedLayout(UNIT_KEYS, element_bitwidth=8, rank=2)
        return reinterpret(copied, dtype, [STAGES, WIDTH, BLOCK_N], TURNED)
    else:
        return gl.allocate_shared_memory(dtype, [STAGES, WIDTH, BLOCK_N], COPIED)


@gluon.jit
def load_values(rows, key, barrier, memory, place):
    """Copy keys key .. of all dimensions of a head into tile `place` of values; zeros beyond the last."""
    desc, batch, head = rows.desc, rows.batch, rows.head
    tile = memory.v.index(place)
    if memory.raw_full is None:
        copy_in(desc, [batch, head, 0, key], barrier, as_block(desc, tile))
    else:
        ROWS: gl.constexpr = desc.block_type.shape[2]
        WIDTH: gl.constexpr = desc.block_type.shape[3]
        BLOCKS: gl.constexpr = tile.shape[1] // ROWS
        blocks = reinterpret(tile, tile.dtype, [BLOCKS, ROWS, WIDTH], tile.layout)
        for part in gl.static_range(BLOCKS):
            copy_in(desc, [batch, head, key + part * ROWS, 0], barrier, as_block(desc, blocks.index(part)))


@gluon.constexpr_function
def turned_layout(dims):
    """Return memory of a turned unit [dims, 16 pairs of keys] as a panel with a swizzle of 32 bytes, but row 8 i + j of
    every odd i stands for dim 8 i + (j ^ 1): `stmatrix` then writes eight rows that share no bank."""
    pairs = [[0, 1], [0, 2], [0, 4], [0, 8]]
    rows = [[1, 0], [2, 0], [4, 8], [9, 0], *([2**i, 0] for i in range(4, dims.bit_length() - 1))]
    return gl.SharedLinearLayout(pairs + rows)


@gluon.jit
def dims_apart(low, high):
    """Return words of two dims of two keys: of each dim the word of all four keys, the odd one first in the upper
    lanes."""
    ASM: gl.constexpr = """{
.reg .b32 lane, first, second;
mov.u32 lane, %laneid;
and.b32 lane, lane, 16;
.reg .pred upper;
setp.ne.u32 upper, lane, 0;
selp.b32 first, 0x7531, 0x6420, upper;
selp.b32 second, 0x6420, 0x7531, upper;
prmt.b32 $0, $2, $3, first;
prmt.b32 $1, $2, $3, second;
}"""
    return gl.inline_asm_elementwise(ASM, "=&r,=r,r,r", [low, high], dtype=(gl.int16, gl.int16), is_pure=True, pack=2)


@gluon.jit
def turn_unit(raw, turned):
    """Read [32 keys, pairs of dims] and write [dims, 16 pairs of keys] to the same memory."""
    PAIRS: gl.constexpr = raw.shape[1]
    # [32, PAIRS]
    x = raw.load(unit_layout(PAIRS))
    # [2, 8, PAIRS]: of every 16 keys the first and the last eight
    low, high = gl.split(gl.permute(gl.reshape(x, [2, 2, 8, PAIRS]), (0, 2, 3, 1)))
    even, odd = dims_apart(low, high)
    # [2 PAIRS, 16]
    turned.store(gl.reshape(gl.permute(gl.join(even, odd), (2, 3, 0, 1)), [2 * PAIRS, 16]))


@gluon.jit
def turn_tile(tile):
    """Transpose [BLOCK_N, head_dim_v] as it was copied to [head_dim_v, BLOCK_N]."""
    KEYS: gl.constexpr = UNIT_KEYS
    DIMS: gl.constexpr = min(tile.shape[0], UNIT_DIMS)
    UNITS: gl.constexpr = tile.shape[0] * tile.shape[1] // (DIMS * KEYS)
    RAW: gl.constexpr = gl.NVMMASharedLayout(DIMS, element_bitwidth=16, rank=2)
    PANEL: gl.constexpr = gl.NVMMASharedLayout(KEYS, element_bitwidth=16, rank=2)
    raw = reinterpret(tile, gl.int16, [UNITS, KEYS, DIMS // 2], RAW)
    turned = reinterpret(tile, gl.int16, [UNITS, DIMS, KEYS // 2], PANEL)
    for unit in gl.static_range(UNITS):
        place = reinterpret(turned.index(unit), gl.int16, [DIMS, KEYS // 2], turned_layout(DIMS))
        turn_unit(raw.index(unit), place)


@gluon.jit
def turner(memory, sizes, OPTIONS: gl.constexpr):
    """Transpose the values of every tile of this block, unless they come transposed."""
    if memory.raw_full is not None:
        turn_slots(memory, sizes, OPTIONS)


@gluon.jit
def turn_slots(memory, sizes, OPTIONS: gl.constexpr):
    """Transpose slot by slot, and say of each that it is full: of the first of a tile, which has no values, as well."""
    BLOCK_M: gl.constexpr = 64 * OPTIONS.CONSUMERS
    q_tiles = (sizes.seqlen_q + BLOCK_M - 1) // BLOCK_M
    slot = first_slot(0)
    tile_slot = first_slot(0)
    tile = gl.program_id(0)
    while tile < q_tiles * sizes.batch_heads:
        m, _ = locate(tile, q_tiles, sizes.head_group, sizes.batch_heads, OPTIONS.RIGHT)
        blocks = key_range(m * BLOCK_M, whole_sequence(sizes), BLOCK_M, OPTIONS)
        for i in range(blocks.last - blocks.first + 2):
            mbarrier.wait(memory.raw_full.index(slot.place), slot.parity)
            if i > 0:
                turn_tile(memory.v.index(slot.place))
                fence_async_shared()
            mbarrier.arrive(memory.full.index(slot.place), count=1)
            slot = next_slot(slot, OPTIONS.STAGES)
        tile, tile_slot = receive(memory.ring, tile_slot)

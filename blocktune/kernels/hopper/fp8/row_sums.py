"""The sums of rows of probabilities in the 8-bit Hopper forward: device functions of kernels/hopper/fp8/steps.py.

The tensor cores add them up, as one more product of the probabilities: with ones, in the eight columns that a product
has at least. Threads would need an addition for every score, one of every five instructions of a step. What is added is
what the values are multiplied with, probabilities that are rounded to e4m3.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from blocktune.kernels.hopper.common.rows import by_thread, of_threads

ONES_COLUMNS = gl.constexpr(8)
"""Columns of ones: as many as a product has at least."""


@gluon.jit
def ones_of(dtype: gl.constexpr, BLOCK_N: gl.constexpr):
    """Shared memory [ONES_COLUMNS, BLOCK_N] of ones in e4m3."""
    ONE: gl.constexpr = 0x38
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    ones = gl.full([ONES_COLUMNS, BLOCK_N], ONE, gl.uint8, L).to(dtype, bitcast=True)
    ONES_L: gl.constexpr = gl.NVMMASharedLayout(BLOCK_N, element_bitwidth=8, rank=2)
    return gl.allocate_shared_memory(dtype, [ONES_COLUMNS, BLOCK_N], ONES_L, ones)


@gluon.jit
def add_up(p, ones):
    """Issues the sums [64, ONES_COLUMNS] of the rows of P, the same in all columns. They begin at zero in every block:
    what 8-bit wgmma cuts off stays small, and sums of blocks are added in float32."""
    N: gl.constexpr = ONES_COLUMNS
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 32])
    return warpgroup_mma(p, ones.permute((1, 0)), gl.zeros([64, N], gl.float32, L), use_acc=False, is_async=True)


@gluon.jit
def joined(sums, factor, added):
    """Sums of rows [64, 4] times a factor, with those that `add_up` gave."""
    return sums * factor + gl.convert_layout(of_threads(by_thread(added)), sums.type.layout)

"""The sums of rows of probabilities in the 8-bit Hopper forward: device functions of kernels/hopper/fp8/steps.py.

The tensor cores add them up, as one more product of the probabilities. Threads would need an addition for every score,
one of every five instructions of a step. What is added is what the values are multiplied with, probabilities rounded to
e4m3: right for the output, but with few keys not exact enough for a log-sum-exp. Where that is wanted, threads add the
numbers up before they are rounded.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from blocktune.kernels.hopper.common.rows import by_thread, of_threads

SHARES_COLUMNS = gl.constexpr(8)
"""As many as a product has at least."""


@gluon.jit
def as_numbers(bytes_, dtype: gl.constexpr):
    """View bytes as 8-bit numbers."""
    return bytes_.to(dtype, bitcast=True)


@gluon.jit
def shares_of(dtype: gl.constexpr, BLOCK_N: gl.constexpr):
    """Fill shared memory [SHARES_COLUMNS, BLOCK_N] with 0.25, which turns a product with P into sums of rows, since
    four threads get it and are added up in the end, as they are where threads add.

    Bytes are written, as ptxas converts a constant wrong: it packs a pair of e4m3 with what a register happens to hold.
    """
    QUARTER: gl.constexpr = 0x28
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    SHARES_L: gl.constexpr = gl.NVMMASharedLayout(BLOCK_N, element_bitwidth=8, rank=2)
    memory = gl.allocate_shared_memory(dtype, [SHARES_COLUMNS, BLOCK_N], SHARES_L)
    memory.store(as_numbers(gl.full([SHARES_COLUMNS, BLOCK_N], QUARTER, gl.uint8, L), dtype))
    return memory


@gluon.jit
def add_up(p, shares):
    """Issue the sums [64, SHARES_COLUMNS] of the rows of P, of every thread its share. They begin at zero in every
    block: what 8-bit wgmma cuts off stays small, and sums of blocks are added in float32."""
    N: gl.constexpr = SHARES_COLUMNS
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 32])
    return warpgroup_mma(p, shares.permute((1, 0)), gl.zeros([64, N], gl.float32, L), use_acc=False, is_async=True)


@gluon.jit
def joined(sums, factor, added):
    """Return the sums of rows [64, 4] times a factor, with those that `add_up` gave."""
    return sums * factor + gl.convert_layout(of_threads(by_thread(added)), sums.type.layout)

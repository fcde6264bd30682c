"""ALiBi by the tensor cores, in Gluon: the scores of a block begin with a product of 16 columns that is a line.

A row of the one operand is the slope in three terms of bfloat16, which together have all 24 bits of a float32; the
other one is a key's place in its block, thrice. So every score begins with slope * place. How far a row stands from the
block's first key is the same for all keys of the block: the softmax takes it off with the maximum of the row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

TERMS = gl.constexpr(3)
LINE_COLUMNS = gl.constexpr(16)
"""Of a product at least."""


@gluon.jit
def places_of_keys(BLOCK_N: gl.constexpr):
    """Allocate shared memory [BLOCK_N, LINE_COLUMNS] with a key's place in the columns of the terms, exact in
    bfloat16."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    PLACES_L: gl.constexpr = gl.NVMMASharedLayout(2 * LINE_COLUMNS, element_bitwidth=16, rank=2)
    keys = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, L)), 1)
    columns = gl.expand_dims(gl.arange(0, LINE_COLUMNS, gl.SliceLayout(0, L)), 0)
    memory = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, LINE_COLUMNS], PLACES_L)
    memory.store(gl.where(columns < TERMS, keys, 0).to(gl.bfloat16))
    return memory


@gluon.jit
def terms_of_slope(slope, S_L: gl.constexpr):
    """Return the slope of a head as an operand [64, LINE_COLUMNS] of products like the scores."""
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, LINE_COLUMNS, 16]
    )
    columns = gl.expand_dims(gl.arange(0, LINE_COLUMNS, gl.SliceLayout(0, L)), 0)
    slopes = gl.full([64, LINE_COLUMNS], slope, gl.float32, L)
    high = slopes.to(gl.bfloat16).to(gl.float32)
    middle = (slopes - high).to(gl.bfloat16).to(gl.float32)
    low = slopes - high - middle
    terms = gl.where(columns == 0, high, gl.where(columns == 1, middle, gl.where(columns == 2, low, 0.0)))
    return gl.convert_layout(terms.to(gl.bfloat16), gl.DotOperandLayout(0, S_L, 2))


@gluon.jit
def turned_if(ahead, terms):
    """Return the terms, of the other sign for keys ahead of the rows."""
    signs = gl.where(ahead, -0x7FFF8000, 0)  # of a pair
    return gl.inline_asm_elementwise(
        "xor.b32 $0, $1, $2;", "=r,r,r,r", [terms, signs], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def line_of_block(terms, places, no_acc):
    """Issue the line [64, BLOCK_N] that the scores of a block begin with."""
    return warpgroup_mma(terms, places.permute((1, 0)), no_acc, use_acc=False, is_async=True)

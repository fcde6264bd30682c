"""The values of an 8-bit attention, transposed and with their keys in the order of the probabilities' registers.

wgmma takes 8-bit operands from shared memory with the summed dimension contiguous, so that V must stand as [dims,
keys]. And it wants of its operand in registers four neighbouring keys a thread, where the accumulator of the scores
holds two: keys (0, 1, 8, 9), (2, 3, 10, 11), ... of every 16 (FlashAttention-3, arXiv 2407.08608, section 3.3). A sum
has no order, hence the keys of V are written in that order and the probabilities stay where they are.
"""

from typing import Any

import triton
import triton.language as tl

from blocktune.kernels.base.flash_kernel import padded_width
from blocktune.kernels.values.shape import AttentionShape

KEYS = 128
"""Keys per program. The written keys are a multiple of this, with zeros after the last one."""
WORD_BYTES = 4
"""The pass moves words of four dims."""
TURNING = {"num_warps": 4}
"""The options of a launch."""


@triton.jit
def turned_words(a, b, c, d):
    """Return words with four numbers of the keys a, b, c, d: four words with the numbers of all of them."""
    return tl.inline_asm_elementwise(
        """{
.reg .b32 low, high;
prmt.b32 low, $4, $5, 0x5140;
prmt.b32 high, $6, $7, 0x5140;
prmt.b32 $0, low, high, 0x5410;
prmt.b32 $1, low, high, 0x7632;
prmt.b32 low, $4, $5, 0x7362;
prmt.b32 high, $6, $7, 0x7362;
prmt.b32 $2, low, high, 0x5410;
prmt.b32 $3, low, high, 0x7632;
}""",
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [a, b, c, d],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit(do_not_specialize=("num_heads_kv", "seqlen_k", "tiles"))
def transpose_values_kernel(
    V, VT, stride_vb, stride_vh, stride_vn, num_heads_kv, seqlen_k, tiles,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write VT [batch, num_heads_kv, HEAD_DIM, tiles * BLOCK] of V [batch, num_heads_kv, seqlen_k, HEAD_DIM] with
    strides of (batch, head, key) that 4 divides; VT is contiguous. This program turns BLOCK keys of one head.

    Numbers change places in registers, four keys by four dims, so that only words go through shared memory. Once all
    programs run, the attention's may be placed beside them.
    """
    tl.extra.cuda.gdc_launch_dependents()
    WORDS: tl.constexpr = BLOCK // 4
    padded_words = tiles * WORDS  # a multiple of 16 that the compiler knows: threads store 16 bytes at once
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    start = tl.program_id(0) % tiles * WORDS
    # [WORDS]
    places = start + tl.arange(0, WORDS)
    # word w of every four holds keys 2 w, 2 w + 1, 2 w + 8, 2 w + 9 of sixteen
    keys = places // 4 * 16 + places % 4 * 2
    # [WIDTH / 4]: four dims each
    quads = tl.arange(0, WIDTH // 4)
    words = V.to(tl.pointer_type(tl.int32))
    words += batch_head // num_heads_kv * (stride_vb // 4) + batch_head % num_heads_kv * (stride_vh // 4)
    inside = (quads < HEAD_DIM // 4)[None, :]
    # [WORDS, WIDTH / 4]
    pointers = words + keys[:, None].to(tl.int64) * (stride_vn // 4) + quads[None, :]
    a = tl.load(pointers, inside & (keys < seqlen_k)[:, None], 0)
    b = tl.load(pointers + stride_vn // 4, inside & (keys + 1 < seqlen_k)[:, None], 0)
    c = tl.load(pointers + 8 * (stride_vn // 4), inside & (keys + 8 < seqlen_k)[:, None], 0)
    d = tl.load(pointers + 9 * (stride_vn // 4), inside & (keys + 9 < seqlen_k)[:, None], 0)
    first, second, third, fourth = turned_words(a, b, c, d)
    # [WORDS, WIDTH]
    turned = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (WORDS, WIDTH))
    # [WIDTH, WORDS]
    dims = tl.arange(0, WIDTH)
    goals = VT.to(tl.pointer_type(tl.int32)) + batch_head * HEAD_DIM * padded_words
    goals += dims[:, None].to(tl.int64) * padded_words + places[None, :]
    tl.store(goals, turned.T, (dims < HEAD_DIM)[:, None])


def turned_sizes(shape: AttentionShape) -> dict[str, Any]:
    """Return the arguments of the pass that follow from the shape."""
    return {
        "num_heads_kv": shape.num_heads_kv,
        "seqlen_k": shape.seqlen_k,
        "tiles": padded_keys(shape) // KEYS,
        "HEAD_DIM": shape.head_dim_v,
        "WIDTH": padded_width(shape.head_dim_v),
        "BLOCK": KEYS,
    }


def padded_keys(shape: AttentionShape) -> int:
    """Return the keys of a head as they are written."""
    return -(-shape.seqlen_k // KEYS) * KEYS

"""The values of an 8-bit attention, transposed and with their keys in the order of the probabilities' registers.

wgmma takes 8-bit operands from shared memory with the summed dimension contiguous, so that V must stand as [dims,
keys]. And it wants of its operand in registers four neighbouring keys a thread, where the accumulator of the scores
holds two: keys (0, 1, 8, 9), (2, 3, 10, 11), ... of every 16 (FlashAttention-3, arXiv 2407.08608, section 3.3). A sum
has no order, hence the keys of V are written in that order and the probabilities stay where they are.
"""

from typing import Any

import triton
import triton.language as tl

from blocktune.kernels.flash_kernel import padded_width
from blocktune.kernels.shape import AttentionShape

KEYS = 128
"""Of a program. The written keys are a multiple of this, zeros behind the last one."""
TURNING = {"num_warps": 4}
"""The options of a launch."""


@triton.jit
def key_at(place):
    """The key that stands at `place`: inside of every 16, bits 3 2 1 0 of the place are bits 2 1 3 0 of the key."""
    return place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2


@triton.jit(do_not_specialize=("num_heads_kv", "seqlen_k", "tiles"))
def transpose_values_kernel(
    V, VT, stride_vb, stride_vh, stride_vn, num_heads_kv, seqlen_k, tiles,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """VT [batch, num_heads_kv, HEAD_DIM, tiles * BLOCK] of V [batch, num_heads_kv, seqlen_k, HEAD_DIM] with strides of
    (batch, head, key); VT is contiguous. This program turns BLOCK keys of one head."""
    padded_k = tiles * BLOCK  # a multiple of 16 that the compiler knows: threads store 16 bytes at once
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    start = tl.program_id(0) % tiles * BLOCK
    places = start + tl.arange(0, BLOCK)
    keys = key_at(places)
    dims = tl.arange(0, WIDTH)
    base = V + batch_head // num_heads_kv * stride_vb + batch_head % num_heads_kv * stride_vh
    inside = (keys[:, None] < seqlen_k) & (dims[None, :] < HEAD_DIM)
    # [BLOCK, WIDTH]
    v = tl.load(base + keys[:, None].to(tl.int64) * stride_vn + dims[None, :], inside, 0.0)
    # [WIDTH, BLOCK]
    pointers = VT + batch_head * HEAD_DIM * padded_k + dims[:, None].to(tl.int64) * padded_k + places[None, :]
    tl.store(pointers, v.T, (dims < HEAD_DIM)[:, None])


def turned_sizes(shape: AttentionShape) -> dict[str, Any]:
    """The arguments of the pass that follow from the shape."""
    return {
        "num_heads_kv": shape.num_heads_kv,
        "seqlen_k": shape.seqlen_k,
        "tiles": padded_keys(shape) // KEYS,
        "HEAD_DIM": shape.head_dim_v,
        "WIDTH": padded_width(shape.head_dim_v),
        "BLOCK": KEYS,
    }


def padded_keys(shape: AttentionShape) -> int:
    """Keys of a head as they are written."""
    return -(-shape.seqlen_k // KEYS) * KEYS

"""Tiles of block-sparse attention: device functions that walk a list of active blocks.

A block of the mask holds 1 << shift tiles. Step s of a row of blocks is tile s mod 2^shift of its active block number
s >> shift. Lists are those of `BlockLists`: indices and before point to a row's first element.

The number of the next tile is loaded one iteration before it is needed: an address that waits for a load would hold up
the asynchronous copies. Those run iterations ahead, past a list's end too, hence every such load says where that is.
"""

import triton
import triton.language as tl

from blocktune.kernels.portable.forward.softmax import (
    exact_step,
    fixed_step,
    is_exact,
    is_sound,
    no_maximum,
    online_step,
)
from blocktune.kernels.portable.forward.tiles import await_product, load_matrix, mask_scores, pack, unpack
from blocktune.kernels.values.errors import UsageError

LIST_SIZES = ("stride_lb", "stride_lh", "stride_lr", "num_blocks", "row_shift", "tile_shift")
"""Integers of a mask, not compiled in either: strides of the lists by (batch, head, row of blocks), blocks of a row,
and log2 of how many query tiles and key tiles make up a block."""


def tile_shift(name: str, block: int, tile: int) -> int:
    """Return log2 of how many tiles make up a block of the mask.

    Args:
        name: of the config's parameter that holds the tile's size.
        block, tile: queries, or keys, of each.

    Raises:
        UsageError: the tiles do not make up the block.
    """
    if block % tile:
        raise UsageError(
            f"`{name}` must divide the mask's blocks, but got {name}={tile} for blocks of {block}. Take a config with "
            f"{name} <= {block}, or a BlockMask of larger blocks."
        )
    return (block // tile).bit_length() - 1


if triton.knobs.runtime.interpret:

    @triton.jit
    def load_number(pointer):
        """The int32 at pointer: the interpreter knows no inline assembly."""
        return tl.load(pointer)
else:

    @triton.jit
    def load_number(pointer):
        """The int32 at pointer, a scalar, by an instruction that Triton does not know for a load.

        A load that it knows it makes asynchronous, together with those of the tiles that depend on it, and then waits
        for all of them at once (seen with Triton 3.6: no tile was copied ahead).
        """
        assembly: tl.constexpr = "ld.global.nc.b32 $0, [$1];"
        return tl.inline_asm_elementwise(assembly, "=r,l", [pointer.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def listed_tile(indices, step, shift):
    """The number of the tile at this step: a scalar."""
    return (load_number(indices + (step >> shift)) << shift) + (step & ((1 << shift) - 1))


@triton.jit
def steps_before(before, tile, num_blocks, shift):
    """How many steps of a row with num_blocks blocks come before this tile, be it active or not."""
    block = tl.minimum(tile >> shift, num_blocks)
    here = tl.load(before + block)
    active = tl.load(before + tl.minimum(block + 1, num_blocks)) - here
    return (here << shift) + active * (tile & ((1 << shift) - 1))


@triton.jit
def walk_in_order(
    q, K, V, acc, l_i, m_i, indices, shift, first, stop, row_start, stride_kn, stride_vn, seqlen_k, causal_offset,
    scale_log2,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Steps first..stop-1 one after another: scores, softmax, product with V. Returns acc, l_i, m_i (if EXACT, not
    scaled)."""
    tile = listed_tile(indices, first, shift)
    for step in tl.range(first, stop, num_stages=STAGES, disable_licm=EXACT):  # what is hoisted would be spilled
        following = listed_tile(indices, tl.minimum(step + 1, stop), shift)
        # [BLOCK_N, WIDTH]
        k = load_matrix(K, tile * BLOCK_N, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, MASKED and RAGGED)
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if MASKED:
            scores = mask_scores(scores, row_start, tile, seqlen_k, causal_offset, CAUSAL)
        if EXACT:
            p, m_i, l_i, factor = exact_step(scores, m_i, l_i, scale_log2)
        else:
            p, m_i, l_i, factor = online_step(scores, m_i, l_i, scale_log2, MASKED)
        # [BLOCK_N, WIDTH_V]
        v = load_matrix(V, tile * BLOCK_N, stride_vn, seqlen_k, BLOCK_N, HEAD_DIM_V, WIDTH_V, MASKED and RAGGED)
        # [BLOCK_M, WIDTH_V]
        acc = tl.dot(p.to(q.dtype), v, acc * factor[:, None], input_precision=PRECISION)
        tile = following
    return acc, l_i, m_i


@triton.jit
def walk_ahead(
    q, K, V, acc, l_i, m_i, indices, shift, full, stride_kn, stride_vn, seqlen_k, scale_log2,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    FIXED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Steps 0..full-1, none masked, with the scores of a tile computed ahead of the product of the one before, as
    `attend_ahead` of flash_tiles.py does for dense tiles and for the same reason. full >= 1. Returns acc, l_i, m_i."""
    tile = listed_tile(indices, 0, shift)
    k_tile = listed_tile(indices, tl.minimum(1, full), shift)
    v_tile = tile
    k = load_matrix(K, tile * BLOCK_N, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, False)
    scores = tl.dot(q, k.T)
    m_i = tl.maximum(no_maximum(scores.shape[0]), tl.max(scores, 1) * scale_log2)
    p, l_i = fixed_step(scores, m_i, l_i, scale_log2)
    carried = pack(p, q.dtype)
    for step in tl.range(1, full, num_stages=STAGES):
        # not k_tile of this iteration, which would be carried on twice: Triton then copies nothing ahead
        next_v_tile = listed_tile(indices, tl.minimum(step, full), shift)
        next_k_tile = listed_tile(indices, tl.minimum(step + 1, full), shift)
        k = load_matrix(K, k_tile * BLOCK_N, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, False)
        v = load_matrix(V, v_tile * BLOCK_N, stride_vn, seqlen_k, BLOCK_N, HEAD_DIM_V, WIDTH_V, False)
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, k.T)
        # [BLOCK_M, WIDTH_V]
        acc = tl.dot(unpack(carried, q.dtype), v, acc)
        if FIXED:
            acc = await_product(acc)
            p, l_i = fixed_step(scores, m_i, l_i, scale_log2)
        else:
            p, m_i, l_i, factor = online_step(scores, m_i, l_i, scale_log2, False)
            acc = acc * factor[:, None]
        carried = pack(p, q.dtype)
        k_tile = next_k_tile
        v_tile = next_v_tile
    v = load_matrix(V, v_tile * BLOCK_N, stride_vn, seqlen_k, BLOCK_N, HEAD_DIM_V, WIDTH_V, False)
    return tl.dot(unpack(carried, q.dtype), v, acc), l_i, m_i


@triton.jit
def attend_listed(
    q, K, V, indices, shift, full, stop, row_start, stride_kn, stride_vn, seqlen_k, causal_offset, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, SCHEDULE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Steps 0..full-1 without and full..stop-1 with a mask: acc [BLOCK_M, WIDTH_V] not yet divided, l_i, m_i."""
    acc = tl.zeros([BLOCK_M, WIDTH_V], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = no_maximum(BLOCK_M)
    if SCHEDULE == 0:
        acc, l_i, m_i = walk_in_order(
            q, K, V, acc, l_i, m_i, indices, shift, 0, full, row_start, stride_kn, stride_vn, seqlen_k, causal_offset,
            scale_log2, BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, False, CAUSAL, RAGGED, False, STAGES, PRECISION,
        )  # fmt: skip
    elif full > 0:
        acc, l_i, m_i = walk_ahead(
            q, K, V, acc, l_i, m_i, indices, shift, full, stride_kn, stride_vn, seqlen_k, scale_log2,
            BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, SCHEDULE == 2, STAGES,
        )  # fmt: skip
    if CAUSAL or RAGGED:
        acc, l_i, m_i = walk_in_order(
            q, K, V, acc, l_i, m_i, indices, shift, full, stop, row_start, stride_kn, stride_vn, seqlen_k,
            causal_offset, scale_log2, BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, True, CAUSAL, RAGGED, False, 1,
            PRECISION,
        )  # fmt: skip
    sound = is_exact(m_i)
    if SCHEDULE == 2:
        sound = sound & is_sound(l_i, acc)
    if not sound:
        acc, l_i, m_i = walk_in_order(
            q, K, V, tl.zeros_like(acc), tl.zeros_like(l_i), no_maximum(BLOCK_M), indices, shift, 0, stop, row_start,
            stride_kn, stride_vn, seqlen_k, causal_offset, scale_log2,
            BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, True, CAUSAL, RAGGED, True, 1, PRECISION,
        )  # fmt: skip
        m_i = m_i * scale_log2
    return acc, l_i, m_i

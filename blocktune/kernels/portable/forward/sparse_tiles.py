"""Tiles of block-sparse attention: device functions that walk a list of active blocks.

A block of the mask holds 1 << shift tiles. Step s of a row of blocks is tile s mod 2^shift of its active block number
s >> shift. Lists are those of `BlockLists`, from a row's first element on.

The number of the next tile is loaded one iteration before it is needed: an address that waits for a load would hold up
the asynchronous copies. Those run iterations ahead, past a list's end too, hence every such load says where that is.
"""

import triton
import triton.language as tl

from blocktune.kernels.portable.forward.arguments import SoftmaxState
from blocktune.kernels.portable.forward.softmax import (
    exact_step,
    fixed_step,
    is_exact,
    is_sound,
    no_maximum,
    online_step,
)
from blocktune.kernels.portable.forward.tiles import await_product, load_matrix, mask_scores, no_state, pack, unpack
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
        """Return the int32 at pointer: the interpreter knows no inline assembly."""
        return tl.load(pointer)
else:

    @triton.jit
    def load_number(pointer):
        """Return the int32 at pointer, a scalar, by an instruction that Triton does not know for a load.

        A load that it knows it makes asynchronous, together with those of the tiles that depend on it, and then waits
        for all of them at once (seen with Triton 3.6: no tile was copied ahead).
        """
        assembly: tl.constexpr = "ld.global.nc.b32 $0, [$1];"
        return tl.inline_asm_elementwise(assembly, "=r,l", [pointer.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def listed_tile(blocks, step):
    """Return the number of the tile at this step: a scalar."""
    shift = blocks.shift
    return (load_number(blocks.indices + (step >> shift)) << shift) + (step & ((1 << shift) - 1))


@triton.jit
def steps_before(before, tile, num_blocks, shift):
    """Return how many steps of a row with num_blocks blocks come before this tile, be it active or not."""
    block = tl.minimum(tile >> shift, num_blocks)
    here = tl.load(before + block)
    active = tl.load(before + tl.minimum(block + 1, num_blocks)) - here
    return (here << shift) + active * (tile & ((1 << shift) - 1))


@triton.jit
def walk_in_order(
    q, keys, blocks, state, first, stop, row_start, sequence, scale_log2,
    MASKED: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Walk steps first..stop-1 one after another: scores, softmax, product with V. Return the `SoftmaxState`, whose
    maxima are not scaled if EXACT."""
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    acc, l_i, m_i = state
    tile = listed_tile(blocks, first)
    for step in tl.range(first, stop, num_stages=STAGES, disable_licm=EXACT):  # what is hoisted would be spilled
        following = listed_tile(blocks, tl.minimum(step + 1, stop))
        # [BLOCK_N, WIDTH]
        k = load_matrix(keys.k, tile * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, MASKED and OPTIONS.RAGGED)
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, k.T, input_precision=OPTIONS.PRECISION)
        if MASKED:
            scores = mask_scores(scores, row_start, tile, sequence.seqlen_k, sequence.diagonal, OPTIONS.CAUSAL)
        if EXACT:
            p, m_i, l_i, factor = exact_step(scores, m_i, l_i, scale_log2)
        else:
            p, m_i, l_i, factor = online_step(scores, m_i, l_i, scale_log2, MASKED)
        # [BLOCK_N, WIDTH_V]
        v = load_matrix(keys.v, tile * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, MASKED and OPTIONS.RAGGED)
        # [BLOCK_M, WIDTH_V]
        acc = tl.dot(p.to(q.dtype), v, acc * factor[:, None], input_precision=OPTIONS.PRECISION)
        tile = following
    return SoftmaxState(acc, l_i, m_i)


@triton.jit
def walk_ahead(q, keys, blocks, state, full, scale_log2, OPTIONS: tl.constexpr):
    """Walk steps 0..full-1, none masked, with the scores of a tile computed ahead of the product of the one before, as
    `attend_ahead` of tiles.py does for dense tiles and for the same reason. full >= 1."""
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    tile = listed_tile(blocks, 0)
    k_tile = listed_tile(blocks, tl.minimum(1, full))
    v_tile = tile
    k = load_matrix(keys.k, tile * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, False)
    scores = tl.dot(q, k.T)
    m_i = tl.maximum(no_maximum(scores.shape[0]), tl.max(scores, 1) * scale_log2)
    p, l_i = fixed_step(scores, m_i, state.l_i, scale_log2)
    acc = state.acc
    carried = pack(p, q.dtype)
    for step in tl.range(1, full, num_stages=OPTIONS.STAGES):
        # not k_tile of this iteration, which would be carried on twice: Triton then copies nothing ahead
        next_v_tile = listed_tile(blocks, tl.minimum(step, full))
        next_k_tile = listed_tile(blocks, tl.minimum(step + 1, full))
        k = load_matrix(keys.k, k_tile * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, False)
        v = load_matrix(keys.v, v_tile * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, False)
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, k.T)
        # [BLOCK_M, WIDTH_V]
        acc = tl.dot(unpack(carried, q.dtype), v, acc)
        if OPTIONS.SCHEDULE == 2:
            acc = await_product(acc)
            p, l_i = fixed_step(scores, m_i, l_i, scale_log2)
        else:
            p, m_i, l_i, factor = online_step(scores, m_i, l_i, scale_log2, False)
            acc = acc * factor[:, None]
        carried = pack(p, q.dtype)
        k_tile = next_k_tile
        v_tile = next_v_tile
    v = load_matrix(keys.v, v_tile * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, False)
    return SoftmaxState(tl.dot(unpack(carried, q.dtype), v, acc), l_i, m_i)


@triton.jit
def attend_listed(q, keys, blocks, full, stop, row_start, sequence, scale_log2, OPTIONS: tl.constexpr):
    """Attend to steps 0..full-1 without and full..stop-1 with a mask, and return the `SoftmaxState`."""
    state = no_state(OPTIONS)
    if OPTIONS.SCHEDULE == 0:
        state = walk_in_order(
            q, keys, blocks, state, 0, full, row_start, sequence, scale_log2, False, False, OPTIONS.STAGES, OPTIONS
        )
    elif full > 0:
        state = walk_ahead(q, keys, blocks, state, full, scale_log2, OPTIONS)
    if OPTIONS.CAUSAL or OPTIONS.RAGGED:
        state = walk_in_order(
            q, keys, blocks, state, full, stop, row_start, sequence, scale_log2, True, False, 1, OPTIONS
        )
    sound = is_exact(state.m_i)
    if OPTIONS.SCHEDULE == 2:
        sound = sound & is_sound(state.l_i, state.acc)
    if not sound:
        state = walk_in_order(
            q, keys, blocks, no_state(OPTIONS), 0, stop, row_start, sequence, scale_log2, True, True, 1, OPTIONS
        )
        state = SoftmaxState(state.acc, state.l_i, state.m_i * scale_log2)
    return state

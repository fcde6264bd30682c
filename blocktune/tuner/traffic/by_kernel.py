"""The bytes that a call of a kernel moves, counted from the loops that it declares (kernels/base/loops.py).

    traffic_of(kernel, config, shape)                       # nothing is found in a cache
    traffic_of(kernel, config, shape, perfect_l2=True)      # in every launch, what blocks share comes from memory once

What a GPU moves lies between the two, and nearer to the second where what is shared fits L2.
"""

from collections.abc import Callable
from functools import partial

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.base.loops import BackwardLoops, DecodeLoops, ForwardLoops, RoundTripLoops, Visits, tile_of
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.traffic.backward import fused_backward_traffic, split_backward_traffic, with_mask_laid_out
from blocktune.tuner.traffic.decode import decode_traffic, single_launch_traffic
from blocktune.tuner.traffic.forward import (
    general_traffic,
    laid_mask_traffic,
    merged_traffic,
    transposed_traffic,
    v1_kernel_traffic,
)
from blocktune.tuner.traffic.launches import Passes, mask_elements_bytes
from blocktune.tuner.traffic.model import Traffic, V2Traffic, v2_traffic
from blocktune.tuner.traffic.sparse import (
    fused_sparse_backward_traffic,
    random_blocks,
    sparse_backward_traffic,
    sparse_forward_traffic,
)


def traffic_of(
    kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, *, perfect_l2: bool = False
) -> Traffic:
    """Return the bytes that one call of a config moves. A block mask is taken to be one of a quarter of the blocks, a
    mask tensor to serve all heads, and lengths of packed sequences and caches to be the longest."""
    match kernel.loops:
        case ForwardLoops() as loops:
            return _forward(loops, config, shape, perfect_l2)
        case RoundTripLoops():  # no cache helps: every pass writes the output again
            return v1_kernel_traffic(shape, config.block_m, config.block_n)
        case DecodeLoops(merges_itself=itself):
            return (single_launch_traffic if itself else decode_traffic)(shape, config, perfect_l2=perfect_l2)
        case BackwardLoops() as loops:
            return _backward(loops, config, shape, perfect_l2)


def is_plain_v2(kernel: AttentionKernel, shape: AttentionShape) -> bool:
    """Return whether the kernel computes the shape by FlashAttention-2 in one launch, and nothing else."""
    return kernel.loops == ForwardLoops() or (
        kernel.loops == ForwardLoops(lays_out_masks=True) and not mask_elements_bytes(shape)
    )


def _forward(loops: ForwardLoops, config: KernelConfig, shape: AttentionShape, perfect_l2: bool) -> Traffic:
    found = _walk(loops.visits, config, shape, perfect_l2)
    if loops.lays_out_masks and mask_elements_bytes(shape):
        return laid_mask_traffic(shape, found, config.block_m, config.block_n, perfect_l2=perfect_l2)
    if loops.splits:
        return merged_traffic(shape, found, config.parameters[loops.splits])
    if loops.transposes and not config.parameters.get(loops.unless):
        return transposed_traffic(shape, found, loops.transposes)
    return found


def _walk(visits: Visits, config: KernelConfig, shape: AttentionShape, perfect_l2: bool) -> V2Traffic | Passes:
    """Return the traffic of the attention itself."""
    blocks = config.block_m, config.block_n
    match visits:
        case Visits.CAUSAL:
            return v2_traffic(shape, *blocks, perfect_l2=perfect_l2)
        case Visits.FEATURES:
            return general_traffic(shape, *blocks, perfect_l2=perfect_l2)
        case Visits.BLOCK_MASK:
            return sparse_forward_traffic(shape, *blocks, random_blocks(shape), perfect_l2=perfect_l2)


def _backward(loops: BackwardLoops, config: KernelConfig, shape: AttentionShape, perfect_l2: bool) -> Traffic:
    keys = tile_of(loops.keys, config)
    if loops.queries is None:
        parts = config.parameters[loops.parts] if loops.parts else 1
        count: Callable[..., Passes] = fused_backward_traffic
        if loops.visits is Visits.BLOCK_MASK:
            count = partial(fused_sparse_backward_traffic, blocks=random_blocks(shape))
        found = count(shape, *keys, perfect_l2=perfect_l2, own_lse=loops.rewrites_lse, parts=parts)
        return with_mask_laid_out(shape, found) if loops.lays_out_masks and mask_elements_bytes(shape) else found
    queries = tile_of(loops.queries, config)
    if loops.visits is Visits.BLOCK_MASK:
        blocks = random_blocks(shape)
        return sparse_backward_traffic(shape, keys=keys, queries=queries, blocks=blocks, perfect_l2=perfect_l2)
    return split_backward_traffic(shape, keys=keys, queries=queries, perfect_l2=perfect_l2)

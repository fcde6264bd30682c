"""Block-sparse attention: whole blocks of (query, key) pairs take part or do not."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.runtime.dispatch.call_checks import check_dimensions, check_sizes
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention
from blocktune.runtime.dispatch.sdpa_arguments import scale_of


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dispatcher: Dispatcher = attention,
) -> Tensor:
    """Compute attention over the active blocks of a mask; the others are neither loaded nor computed, so that time goes
    with the density (FlashAttention, arXiv 2205.14135, algorithm 5). Differentiable.

    query [batch, num_heads, seqlen_q, head_dim], key and value [batch, num_heads_kv, seqlen_k, head_dim(_v)]; causal
    from the upper left; scale is 1 / sqrt(head_dim) unless given. A row without any key gives zeros.
    dispatcher: whose configs serve the call.

    Raises:
        UsageError: the mask is no BlockMask, is on another device or belongs to other lengths; or the tensors do not
            fit each other.
    """
    if not isinstance(block_mask, BlockMask):
        raise UsageError(
            f"`block_mask` must be a BlockMask, but got {type(block_mask).__name__}. Make one with "
            "BlockMask.from_dense or BlockMask.from_predicate."
        )
    way = ("block_sparse_attention", block_mask.block_q, block_mask.block_k, is_causal, scale)
    tensors = (query, key, value, block_mask.mask)
    bound = None if is_compiling() else dispatcher.find_dense_call(way, *tensors)
    if bound is not None:
        return bound(query, key, value, block_mask=block_mask)[0]
    check_dimensions("[batch, heads, length, dim]", query=query, key=key, value=value)
    if block_mask.mask.device != query.device:
        raise UsageError(
            f"`block_mask` must be on the query's device, but got {block_mask.mask.device} and {query.device}. "
            "Make the BlockMask there."
        )
    check_sizes(query, key, value)
    if not is_compiling():  # a launch checks it too
        block_mask.check_fits(_shape_of(query, key, value))
    out, _ = dispatcher.attend(
        query,
        key,
        value,
        causal=Causal.UPPER_LEFT if is_causal else Causal.NONE,
        scale=scale_of(query, scale),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        block_mask=block_mask,
        remember=lambda fast_path, bound: fast_path.add(way, tensors, bound),
    )
    return out


def _shape_of(query: Tensor, key: Tensor, value: Tensor) -> AttentionShape:
    """Return the sizes of a call; a mask fits these, whatever the data type."""
    batch, num_heads, seqlen_q, head_dim = query.shape
    return AttentionShape(
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=key.shape[1],
        seqlen_q=seqlen_q,
        seqlen_k=key.shape[2],
        head_dim=head_dim,
        head_dim_v=value.shape[3],
    )

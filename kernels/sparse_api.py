"""Block-sparse attention: whole blocks of (query, key) pairs take part or do not."""

from torch import Tensor

from blocktune.kernels.block_mask import BlockMask
from blocktune.kernels.engine import attend, shape_of_call
from blocktune.kernels.errors import UsageError
from blocktune.kernels.extras import Extras
from blocktune.kernels.features import Features, MaskKind
from blocktune.kernels.masked_math import masked_attention
from blocktune.kernels.shape import Causal


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention over the active blocks of a mask; the others are neither loaded nor computed, so that time goes with
    the density (FlashAttention, arXiv 2205.14135, algorithm 5). Inference only.

    query [batch, num_heads, seqlen_q, head_dim], key and value [batch, num_heads_kv, seqlen_k, head_dim(_v)]; causal
    from the upper left; scale is 1 / sqrt(head_dim) unless given. A row without any key gives zeros.

    Raises:
        UsageError: the mask is no BlockMask, is on another device or belongs to other lengths; or gradients are needed.
    """
    if not isinstance(block_mask, BlockMask):
        raise UsageError(
            f"`block_mask` must be a BlockMask, but got {type(block_mask).__name__}. Make one with "
            "BlockMask.from_dense or BlockMask.from_predicate."
        )
    if block_mask.mask.device != query.device:
        raise UsageError(
            f"`block_mask` must be on the query's device, but got {block_mask.mask.device} and {query.device}. "
            "Make the BlockMask there."
        )
    causal = Causal.UPPER_LEFT if is_causal else Causal.NONE
    features = Features(mask=MaskKind.BLOCK_SPARSE)
    shape = shape_of_call(query, key.shape[1], key.shape[2], value.shape[3], causal, features=features)
    block_mask.check_fits(shape)
    factor = query.shape[-1] ** -0.5 if scale is None else scale

    def mathematics() -> tuple[Tensor, Tensor]:
        seen = block_mask.to_dense(shape.seqlen_q, shape.seqlen_k)
        return masked_attention(query, key, value, seen.tril() if is_causal else seen, factor)

    extras = Extras(block_mask=block_mask)
    out, _ = attend(shape, query, key, value, extras, factor, check=lambda: None, mathematics=mathematics)
    return out

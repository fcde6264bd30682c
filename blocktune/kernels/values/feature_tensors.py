"""The run-time values that come with a call's features, in addition to query, key and value."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a launch gets besides its tensors; a value is None (or 0) where the shape lacks the feature.

    mask: boolean or additive [batch or 1, num_heads or 1, seqlen_q or 1, seqlen_k], any strides (0 where broadcast).
    alibi_slopes: float32 [batch or 1, num_heads]. softcap: > 0. dropout_p: in [0, 1), with the 64-bit seed and offset
    that Philox makes the dropped pairs from (see kernels/values/dropout.py). cu_seqlens_q, cu_seqlens_k: int32 [batch +
    1], where each packed sequence begins. cache_seqlens: int32 [batch], keys of each entry. block_table: int32 [batch,
    max_pages], the page of every page_size keys. block_mask: a `BlockMask`. tree_mask: int32 [batch, seqlen_q, words],
    bit j % 32 of word j // 32 is set where the query sees key number (length - seqlen_q + j): a draft of its tree.
    scale_q, scale_k, scale_v: of 8-bit tensors, what every number of a head is multiplied with: > 0, float32 [batch or
    1, num_heads(_kv) or 1], any strides; None is 1. sinks: [num_heads], a logit that joins the softmax of every row: in
    a forward kernel, or in a pass over its results (kernels/portable/sinks). grad_lse: of a backward, the gradient of
    the log-sum-exp, which is laid out like it in float32; None is 0.
    """

    mask: "Tensor | None" = None
    alibi_slopes: "Tensor | None" = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0
    cu_seqlens_q: "Tensor | None" = None
    cu_seqlens_k: "Tensor | None" = None
    cache_seqlens: "Tensor | None" = None
    block_table: "Tensor | None" = None
    block_mask: Any = None
    tree_mask: "Tensor | None" = None
    scale_q: "Tensor | None" = None
    scale_k: "Tensor | None" = None
    scale_v: "Tensor | None" = None
    sinks: "Tensor | None" = None
    grad_lse: "Tensor | None" = None

    def with_grad_lse(self, grad_lse: "Tensor | None") -> "Extras":
        """Return the these of a backward in which the log-sum-exp has this gradient."""
        return self if grad_lse is None else replace(self, grad_lse=grad_lse)


NO_EXTRAS = Extras()

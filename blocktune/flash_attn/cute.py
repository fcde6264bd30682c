"""FlashAttention-4's functions, `flash_attn.cute`: they return the output and the log-sum-exp.

`num_splits`, `pack_gqa` and the scheduler's arguments choose among its kernels, and nothing here. Functions that are
compiled into its kernels (score_mod, mask_mod) and its block-sparse tensors are refused.
"""

from typing import Any

from torch import Tensor

from blocktune.flash_attn.arguments import attend_used, refuse, window_pair
from blocktune.runtime.api import flash_attn


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [batch, seqlen_q, num_heads, head_dim_v], and with return_lse the log-sum-exp float32 [batch,
    num_heads, seqlen_q], else None.

    Raises:
        UsageError: as `blocktune.flash_attn_func` raises, or an argument is not served.
    """
    del num_splits, pack_gqa
    refuse(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors, block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )  # fmt: skip
    found = flash_attn.flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window_pair(window_size), softcap,
        deterministic=deterministic, return_attn_probs=return_lse, s_aux=learnable_sink,
    )  # fmt: skip
    return (found, None) if isinstance(found, Tensor) else found[:2]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [tokens_q, num_heads, head_dim_v] of packed sequences, and with return_lse the log-sum-exp
    float32 [num_heads, tokens_q], else None.

    Raises:
        UsageError: as `blocktune.flash_attn_varlen_func` raises, or an argument is missing or not served.
    """
    del num_splits, pack_gqa, min_seqlen_k, scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata
    refuse(
        qv=qv, gather_kv_indices=gather_kv_indices, seqused_q=seqused_q, score_mod=score_mod,
        score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors, aux_scalars=aux_scalars,
    )  # fmt: skip
    found = attend_used(
        q, k, v, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), seqused_k, page_table,
        softmax_scale=softmax_scale, causal=causal, window_size=window_pair(window_size), softcap=softcap,
        deterministic=deterministic, return_attn_probs=return_lse, s_aux=learnable_sink,
    )  # fmt: skip
    return (found, None) if isinstance(found, Tensor) else found[:2]

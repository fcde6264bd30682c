"""FlashAttention-3's functions, which it has in a module `flash_attn_interface` of its own.

`num_splits` of queries without a cache, `pack_gqa`, `sm_margin` and `scheduler_metadata` choose among its kernels, and
nothing here. `out` is where results are written, as in vLLM's edition.
"""

from typing import Any

from torch import Tensor

from blocktune.flash_attn.arguments import attend_used, refuse, write_result
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import UNLIMITED
from blocktune.runtime.api import flash_attn, kv_cache
from blocktune.runtime.api.fp8 import attention_fp8
from blocktune.runtime.dispatch.obstacles import EIGHT_BITS

UNBOUNDED = (UNLIMITED, UNLIMITED)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the output [batch, seqlen_q, num_heads, head_dim_v]; with return_attn_probs also the log-sum-exp float32
    [batch, num_heads, seqlen_q].

    Tensors of torch.float8_e4m3fn stand for their numbers times q_descale, k_descale and v_descale, float32 [batch,
    num_heads_kv]; they have no windows, soft caps and log-sum-exps.

    Raises:
        UsageError: as `blocktune.flash_attn_func` raises, or an argument is not served.
    """
    del num_splits, pack_gqa, sm_margin
    refuse(qv=qv, attention_chunk=attention_chunk)
    if q.dtype is EIGHT_BITS:
        refuse(softcap=softcap, return_attn_probs=return_attn_probs)
        refuse(window_size=None if tuple(window_size) == UNBOUNDED else window_size)
        return write_result(out, _attend_in_8_bits(q, k, v, (q_descale, k_descale, v_descale), causal, softmax_scale))
    refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    found = flash_attn.flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window_size, softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip
    return _results(found, out)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    out: Tensor | None = None,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the output [tokens_q, num_heads, head_dim_v] of packed sequences; with return_attn_probs also the
    log-sum-exp float32 [num_heads, tokens_q].

    Raises:
        UsageError: as `blocktune.flash_attn_varlen_func` raises, or an argument is not served.
    """
    del num_splits, pack_gqa, sm_margin
    refuse(seqused_q=seqused_q, qv=qv, attention_chunk=attention_chunk)
    refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    found = attend_used(
        q, k, v, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), seqused_k, block_table,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs, s_aux=s_aux,
    )  # fmt: skip
    return _results(found, out)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the output of queries over a cache, as `blocktune.flash_attn_with_kvcache`; with cu_seqlens_q of packed
    queries [tokens_q, num_heads, head_dim] over pages. With return_softmax_lse also the log-sum-exp.

    Raises:
        UsageError: as that function raises, or an argument is not served.
    """
    del scheduler_metadata, pack_gqa, sm_margin
    refuse(qv=qv, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens, q_descale=q_descale)
    refuse(attention_chunk=attention_chunk)
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
    options |= {"softcap": softcap, "s_aux": s_aux}
    if cu_seqlens_q is None:
        found = kv_cache.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
            page_table, rotary_interleaved=rotary_interleaved, num_splits=num_splits,
            return_softmax_lse=return_softmax_lse, k_descale=k_descale, v_descale=v_descale, **options,
        )  # fmt: skip
        return _results(found, out)
    refuse(k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, k_descale=k_descale, v_descale=v_descale)
    refuse(cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    if page_table is None or not isinstance(cache_seqlens, Tensor):
        raise UsageError(
            "Packed queries over a cache need page_table and a tensor of cache_seqlens, but one of them is missing. "
            "Give both, or pad the queries."
        )
    longest = (q.shape[0] if max_seqlen_q is None else max_seqlen_q), None
    packed = attend_used(
        q, k_cache, v_cache, cu_seqlens_q, None, longest, cache_seqlens, page_table,
        return_attn_probs=return_softmax_lse, **options,
    )  # fmt: skip
    return _results(packed, out)


def _results(found: Any, out: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """Return the output, or output and log-sum-exp, of a function of FlashAttention-2."""
    if isinstance(found, Tensor):
        return write_result(out, found)
    return write_result(out, found[0]), found[1]


def _attend_in_8_bits(
    q: Tensor, k: Tensor, v: Tensor, descales: tuple[Tensor | None, ...], causal: bool, scale: float | None
) -> Tensor:
    """Return the output of 8-bit tensors [batch, length, heads, dim].

    Raises:
        UsageError: as `attention_fp8` raises, or causal lengths differ.
    """
    if causal and q.shape[1] != k.shape[1]:
        raise UsageError(
            f"8-bit causal tensors must have one length, but got {q.shape[1]} queries and {k.shape[1]} keys. Convert "
            "them to bfloat16."
        )
    of_queries, of_keys, of_values = descales
    if of_queries is not None:
        of_queries = of_queries.repeat_interleave(q.shape[2] // k.shape[2], dim=-1)  # one for the heads of a group
    turned = (tensor.transpose(1, 2) for tensor in (q, k, v))
    found = attention_fp8(
        *turned, scale_q=of_queries, scale_k=of_keys, scale_v=of_values, is_causal=causal, scale=scale
    )
    return found.transpose(1, 2)

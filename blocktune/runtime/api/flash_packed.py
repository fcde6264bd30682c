"""FlashAttention-2's functions of queries, keys and values in one tensor: views of it, and the functions of three."""

from torch import Tensor

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.api.flash_attn import UNBOUNDED, Attended, flash_attn_func, flash_attn_varlen_func
from blocktune.runtime.dispatch.call_checks import check_dimensions
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dispatcher: Dispatcher = attention,
) -> Attended:
    """Return `flash_attn_func` of qkv [batch, seqlen, 3, num_heads, head_dim], with its options and results.

    Raises:
        UsageError: as `flash_attn_func` raises, or qkv does not hold three tensors.
    """
    check_dimensions("[batch, seqlen, 3, heads, dim]", qkv=qkv)
    q, k, v = _parts("qkv", qkv, 3)
    return flash_attn_func(
        q, k, v,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        dispatcher=dispatcher,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dispatcher: Dispatcher = attention,
) -> Attended:
    """Return `flash_attn_func` of q and kv [batch, seqlen_k, 2, num_heads_kv, head_dim], with its options and results.

    Raises:
        UsageError: as `flash_attn_func` raises, or kv does not hold two tensors.
    """
    check_dimensions("[batch, seqlen, 2, heads, dim]", kv=kv)
    k, v = _parts("kv", kv, 2)
    return flash_attn_func(
        q, k, v,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        dispatcher=dispatcher,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dispatcher: Dispatcher = attention,
) -> Attended:
    """Return `flash_attn_varlen_func` of qkv [tokens, 3, num_heads, head_dim], with its options and results.

    Raises:
        UsageError: as `flash_attn_varlen_func` raises, or qkv does not hold three tensors.
    """
    check_dimensions("[tokens, 3, heads, dim]", qkv=qkv)
    q, k, v = _parts("qkv", qkv, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        dispatcher=dispatcher,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dispatcher: Dispatcher = attention,
) -> Attended:
    """Return `flash_attn_varlen_func` of q and kv [tokens_k, 2, num_heads_kv, head_dim], with its options and results.

    Raises:
        UsageError: as `flash_attn_varlen_func` raises, or kv does not hold two tensors.
    """
    check_dimensions("[tokens, 2, heads, dim]", kv=kv)
    k, v = _parts("kv", kv, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        dispatcher=dispatcher,
    )  # fmt: skip


def _parts(name: str, packed: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return the tensors that a packed one [..., count, heads, dim] holds.

    Raises:
        UsageError: it holds more or fewer.
    """
    if packed.shape[-3] != count:
        raise UsageError(
            f"`{name}` must hold {count} tensors in its third dimension from the end, but got {tuple(packed.shape)}. "
            "Stack them there."
        )
    parts: tuple[Tensor, ...] = packed.unbind(-3)
    return parts

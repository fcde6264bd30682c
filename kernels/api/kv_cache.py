"""Attention over a cache of keys and values, contiguous or paged: decoding, and trees of drafts."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from blocktune.kernels.api.cache_rows import CacheRows
from blocktune.kernels.api.flash_arguments import real_number, splits_of, whole_number, window_of
from blocktune.kernels.api.rotary import Rotary
from blocktune.kernels.dispatch.call import Call
from blocktune.kernels.dispatch.call_checks import (
    check_dimensions,
    check_sinks,
    check_sizes,
    check_slopes,
    check_softcap,
)
from blocktune.kernels.dispatch.dispatcher import Dispatcher, attention
from blocktune.kernels.dispatch.plan import needs_gradients, scale_of
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import UNLIMITED
from blocktune.kernels.values.shape import Causal
from blocktune.kernels.values.tree_mask import WORD_BITS

NO_WINDOW = (UNLIMITED, UNLIMITED)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    dispatcher: Dispatcher = attention,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a cache, with FlashAttention-2's arguments and meaning. Inference only.

    q [batch, seqlen_q, num_heads, head_dim]; k_cache and v_cache [entries, seqlen_k, num_heads_kv, head_dim(_v)], or
    with block_table (int32 [batch, max_pages]) pages [num_pages, page_size, num_heads_kv, head_dim(_v)]. cache_seqlens:
    int32 [batch], the rows of every entry that are filled, or one number for all; the whole cache by default.
    cache_batch_idx: int32 [batch], the cache's entry of each batch entry, which must differ where k is given;
    cache_leftpad: int32 [batch], how many of the filled rows hold no key, counted from the first. Both are for caches
    without pages.

    k and v [batch, new, num_heads_kv, head_dim(_v)] are first written into the cache after what is there. rotary_cos
    and rotary_sin [positions, width / 2] turn them, and the queries, by their positions: new key i is at cache_seqlens
    + i, and so is query i, unless neither causal nor a window tells queries apart; then all are at cache_seqlens.

    causal aligns to the last key, and so do window_size (left, right) and alibi_slopes (float32 [num_heads] or [batch,
    num_heads]); softcap 0 means no softcap. num_splits: 0 takes the tuned config with its splits of the keys; 1 to 128,
    rounded up to a power of two, takes a config that depends on the sizes of an entry only, so that its result is
    the same to the bit whatever else is in the batch. s_aux [num_heads]: attention sinks, as in `flash_attn_func`.
    Values of lengths and tables are checked at the first call of a kind. dispatcher: whose configs serve the call.

    Returns:
        the output [batch, seqlen_q, num_heads, head_dim_v]; with return_softmax_lse also the log-sum-exp
        [batch, num_heads, seqlen_q].

    Raises:
        UsageError: sizes or data types do not fit, a table points outside, or gradients are needed. It is a
            RuntimeError, as flash-attention's is.
        TooFewDimensionsError: q or a cache has fewer than four dimensions. It is an IndexError as well.
        WrongTypeError: an argument is no tensor or no number. It is a TypeError as well.
    """
    check_dimensions("[batch, seqlen, heads, dim]", q=q, k_cache=k_cache, v_cache=v_cache)
    rows = CacheRows.of(q, cache_batch_idx, cache_leftpad, block_table)
    lengths = _lengths(cache_seqlens, q, rows.capacity(k_cache))
    new = _new_rows(k, v, q, k_cache, v_cache)
    rotary = Rotary.of(rotary_cos, rotary_sin, rotary_interleaved, q, k, rows.capacity(k_cache))
    window, filled = window_of(window_size), lengths
    if rotary is not None:
        q = rotary.turned(q, _positions(filled, q.shape[1] if causal or window != NO_WINDOW else 1))
    query, slopes = q.transpose(1, 2), check_slopes(alibi_slopes, q.shape[0], q.shape[2], q)
    softcap = real_number("softcap", softcap)
    check_softcap(softcap)
    k_pages, v_pages, table = rows.as_pages(k_cache, v_cache)
    sinks = check_sinks(s_aux, query.shape[1], query)
    _check_cache(query, k_pages, v_pages, table, sinks)
    if new is not None:
        lengths = lengths + new[0].shape[1]
    if cache_leftpad is not None:
        _check_room(dispatcher, query, (k_cache, v_cache), lengths)
        lengths = lengths - cache_leftpad
    asked = _asked(query, k_pages, lengths, table, softmax_scale, causal=causal)
    asked |= {"window": window, "softcap": softcap, "alibi_slopes": slopes, "num_splits": splits_of(num_splits)}
    asked["sinks"] = sinks
    keys, values = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    if new is not None:
        if not is_compiling():
            dispatcher.check(query, keys, values, Call.of(**asked))
        _append(rows, (k_cache, v_cache), new, filled, rotary)
    out, lse = dispatcher.attend(query, keys, values, lse=return_softmax_lse, **asked)
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tree_mask: Tensor,
    cache_seqlens: Tensor,
    *,
    block_table: Tensor | None = None,
    scale: float | None = None,
    dispatcher: Dispatcher = attention,
) -> Tensor:
    """Drafts of speculative decoding: every query sees the cache before the drafts, and of these what its bits say.

    query [batch, num_heads, drafts, head_dim]; the caches as `flash_attn_with_kvcache` takes them, with the drafts' own
    keys the last of each entry's cache_seqlens (int32 [batch]). tree_mask int32 [batch, drafts, ceil(drafts / 32)], as
    `tree_words` makes one for each entry. dispatcher: whose configs serve the call.

    Raises:
        UsageError: sizes or data types do not fit, a table points outside, or gradients are needed.
        TooFewDimensionsError: the query or a cache has fewer than four dimensions.
        WrongTypeError: an argument is no tensor.
    """
    check_dimensions("[batch, heads, drafts, dim]", query=query)
    check_dimensions("[batch, seqlen, heads, dim]", key_cache=key_cache, value_cache=value_cache)
    batch, _, drafts, _ = query.shape
    wanted = (batch, drafts, -(-drafts // WORD_BITS))
    if tree_mask.shape != wanted or tree_mask.dtype != torch.int32:
        raise UsageError(
            f"`tree_mask` must be int32 [batch, drafts, ceil(drafts / 32)] = {wanted}, but got {tree_mask.dtype} "
            f"{tuple(tree_mask.shape)}. Stack tree_words(parents) of every entry."
        )
    rows = CacheRows.of(query, None, None, block_table)
    lengths = _lengths(cache_seqlens, query, rows.capacity(key_cache))
    k_pages, v_pages, table = rows.as_pages(key_cache, value_cache)
    _check_cache(query, k_pages, v_pages, table)
    asked = _asked(query, k_pages, lengths, table, scale, causal=False)
    keys, values = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    return dispatcher.attend(query, keys, values, tree_mask=tree_mask, **asked)[0]


def _lengths(given: Tensor | int | None, q: Tensor, capacity: int) -> Tensor:
    """cache_seqlens as int32 [batch]; q is [batch, ...]."""
    if not isinstance(given, Tensor):
        rows = capacity if given is None else whole_number("cache_seqlens", given)
        return torch.full((q.shape[0],), rows, dtype=torch.int32, device=q.device)
    if given.dtype != torch.int32 or given.shape != (q.shape[0],):
        raise UsageError(
            f"`cache_seqlens` must be int32 [batch] with batch {q.shape[0]}, but got {given.dtype} "
            f"{tuple(given.shape)}. Convert it with cache_seqlens.to(torch.int32)."
        )
    return given


def _new_rows(
    k: Tensor | None, v: Tensor | None, q: Tensor, k_cache: Tensor, v_cache: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The keys and values to append, if there are any.

    Raises:
        UsageError: one is missing, or they do not fit the caches or each other.
    """
    if (k is None) != (v is None):
        raise UsageError("`k` and `v` are appended together, but only one is given. Give both or none.")
    if k is None or v is None:
        return None
    check_dimensions("[batch, new, heads, dim]", k=k, v=v)
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if (new.shape[0], *new.shape[2:]) != (q.shape[0], *cache.shape[2:]) or new.shape[1] != k.shape[1]:
            raise UsageError(
                f"`{name}` must be [batch, new, heads, dim] with batch {q.shape[0]} and the heads and dim of its cache "
                f"{tuple(cache.shape)}, as many rows in k and v, but got {tuple(new.shape)}. Check which is which."
            )
    return k, v


def _check_room(dispatcher: Dispatcher, query: Tensor, caches: tuple[Tensor, Tensor], lengths: Tensor) -> None:
    """Raises:
    UsageError: a contiguous cache has fewer rows than the lengths, which count those of the padding, too.
    """
    if is_compiling():
        return
    sizes = (query.shape[0], query.shape[2], caches[0].shape[1])
    call = Call.of(causal=Causal.NONE, scale=1.0, cache_seqlens=lengths, lengths=sizes)
    dispatcher.check(query, caches[0].transpose(1, 2), caches[1].transpose(1, 2), call)


def _positions(lengths: Tensor, count: int) -> Tensor:
    """Return int64 [batch, count]: `count` positions from each length on."""
    return lengths.long()[:, None] + torch.arange(count, device=lengths.device)[None]


def _append(
    rows: CacheRows,
    caches: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    lengths: Tensor,
    rotary: Rotary | None,
) -> None:
    """Write new keys, turned, and values [batch, new, ...] after the present ones: `lengths` of each entry."""
    positions = _positions(lengths, new[0].shape[1])
    keys = new[0] if rotary is None else rotary.turned(new[0], positions)
    rows.write(caches[0], keys, positions)
    rows.write(caches[1], new[1], positions)


def _asked(
    query: Tensor, k_cache: Tensor, lengths: Tensor, table: Tensor | None, scale: float | None, *, causal: bool
) -> dict[str, Any]:
    """What every call over a cache asks for; query is [batch, num_heads, seqlen_q, head_dim]."""
    page_size = 0 if table is None else k_cache.shape[1]
    capacity = k_cache.shape[1] if table is None else page_size * table.shape[1]
    return {
        "causal": Causal.LOWER_RIGHT if causal else Causal.NONE,
        "scale": scale_of(query, None if scale is None else real_number("softmax_scale", scale)),
        "cache_seqlens": lengths,
        "block_table": table,
        "page_size": page_size,
        "lengths": (query.shape[0], query.shape[2], capacity),
    }


def _check_cache(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor | None, sinks: Tensor | None = None
) -> None:
    """query [batch, num_heads, seqlen_q, head_dim]; the caches as `flash_attn_with_kvcache` takes them.

    Raises:
        UsageError: they do not fit each other, a block table is invalid, or a gradient is needed.
    """
    if needs_gradients(query, k_cache, v_cache, sinks):
        raise UsageError(
            "Attention over a cache computes no gradients, but a tensor requires one. Call it under torch.no_grad(), "
            "or another entry point."
        )
    caches = [cache.transpose(1, 2) for cache in (k_cache, v_cache)]
    if table is not None:
        caches = [cache[:1].expand(query.shape[0], -1, -1, -1) for cache in caches]
    check_sizes(query, *caches, names="queries and caches")

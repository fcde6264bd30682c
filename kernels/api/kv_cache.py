"""Attention over a cache of keys and values, contiguous or paged: decoding, and trees of drafts."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from blocktune.kernels.api.flash_arguments import real_number, sides, whole_number, window_of
from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.dispatch.autograd import Layout, Served
from blocktune.kernels.dispatch.call import Call
from blocktune.kernels.dispatch.call_checks import check_dimensions, check_sizes, check_slopes, check_softcap
from blocktune.kernels.dispatch.dispatcher import Dispatcher, attention
from blocktune.kernels.dispatch.plan import is_capturing, needs_gradients, on_its_device, scale_of, trace_obstacle
from blocktune.kernels.portable.decode.append import AppendLaunch, append_obstacle
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import UNLIMITED
from blocktune.kernels.values.shape import Causal
from blocktune.kernels.values.tree_mask import WORD_BITS


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
    window_size: tuple[int, int] = (UNLIMITED, UNLIMITED),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    dispatcher: Dispatcher = attention,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a cache, with FlashAttention-2's arguments and meaning. Inference only.

    q [batch, seqlen_q, num_heads, head_dim]; k_cache and v_cache [batch, seqlen_k, num_heads_kv, head_dim(_v)], or with
    block_table (int32 [batch, max_pages]) pages [num_pages, page_size, num_heads_kv, head_dim(_v)]. cache_seqlens:
    int32 [batch], the keys of every entry, or one number for all; the whole cache by default. k and v [batch, new,
    num_heads_kv, head_dim(_v)] are first written into the cache after them. causal aligns to the last key, and so do
    window_size (left, right) and alibi_slopes (float32 [num_heads] or [batch, num_heads]); softcap 0 means no softcap.
    The tuned config says how many splits there are. Values of lengths and tables are checked at the first call of a
    kind. dispatcher: whose configs serve the call.

    Returns:
        the output [batch, seqlen_q, num_heads, head_dim_v]; with return_softmax_lse also the log-sum-exp
        [batch, num_heads, seqlen_q].

    Raises:
        NotImplementedError: an argument is given that is not served (rotary, batch index, left padding, a fixed number
            of splits).
        UsageError: sizes or data types do not fit, a table points outside, or gradients are needed. It is a
            RuntimeError, as flash-attention's is.
        TooFewDimensionsError: q or a cache has fewer than four dimensions. It is an IndexError as well.
        WrongTypeError: an argument is no tensor or no number. It is a TypeError as well.
    """
    del rotary_interleaved
    _refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    _refuse(num_splits=num_splits or None)
    way = ("flash_attn_with_kvcache", softmax_scale, causal, sides(window_size), softcap, return_softmax_lse)
    given = cache_seqlens if isinstance(cache_seqlens, Tensor) else None
    tensors = (q, k_cache, v_cache, k, v, given, block_table, alibi_slopes)
    number = None if given is cache_seqlens else whole_number("cache_seqlens", cache_seqlens)
    served = None if is_compiling() else dispatcher.way(way, *tensors)
    if served is not None:
        out, lse = _again(served, number, *tensors)
        return (out, lse) if return_softmax_lse else out
    check_dimensions("[batch, seqlen, heads, dim]", q=q, k_cache=k_cache, v_cache=v_cache)
    lengths = _lengths(cache_seqlens, q, k_cache, block_table)
    query, slopes = q.transpose(1, 2), check_slopes(alibi_slopes, q.shape[0], q.shape[2], q)
    softcap = real_number("softcap", softcap)
    check_softcap(softcap)
    _check_cache(query, k_cache, v_cache, block_table)
    if (k is None) != (v is None):
        raise UsageError("`k` and `v` are appended together, but only one is given. Give both or none.")
    if k is not None and v is not None:
        check_dimensions("[batch, new, heads, dim]", k=k, v=v)
        lengths = lengths + k.shape[1]
    asked = _asked(query, k_cache, lengths, block_table, softmax_scale, causal=causal)
    asked |= {"window": window_of(window_size), "softcap": softcap, "alibi_slopes": slopes}
    keys, values = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    ahead = None
    if k is not None and v is not None:
        if not is_compiling():
            dispatcher.check(query, keys, values, Call.of(**asked))
        all_have = capacity_of(k_cache, block_table) if number is None else number
        ahead = _append(k_cache, v_cache, k, v, lengths, given, all_have, block_table)
    remember = None
    if k is None or ahead is not None:
        remember = lambda ways, served: ways.add(way, tensors, served.laid_out(Layout.LENGTH_FIRST, ahead))  # noqa: E731
    out, lse = dispatcher.attend(query, keys, values, lse=return_softmax_lse, remember=remember, **asked)
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
    tensors = (query, key_cache, value_cache, cache_seqlens, block_table, tree_mask)
    served = None if is_compiling() else dispatcher.way(("tree_attention", scale), *tensors)
    if served is not None:
        keys, values = Layout.LENGTH_FIRST.inside(key_cache, value_cache)
        return served(query, keys, values, *(tensor for tensor in tensors[3:] if tensor is not None))[0]
    check_dimensions("[batch, heads, drafts, dim]", query=query)
    check_dimensions("[batch, seqlen, heads, dim]", key_cache=key_cache, value_cache=value_cache)
    batch, _, drafts, _ = query.shape
    wanted = (batch, drafts, -(-drafts // WORD_BITS))
    if tree_mask.shape != wanted or tree_mask.dtype != torch.int32:
        raise UsageError(
            f"`tree_mask` must be int32 [batch, drafts, ceil(drafts / 32)] = {wanted}, but got {tree_mask.dtype} "
            f"{tuple(tree_mask.shape)}. Stack tree_words(parents) of every entry."
        )
    lengths = _lengths(cache_seqlens, query.transpose(1, 2), key_cache, block_table)
    _check_cache(query, key_cache, value_cache, block_table)
    asked = _asked(query, key_cache, lengths, block_table, scale, causal=False)
    keys, values = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    remember = lambda ways, served: ways.add(("tree_attention", scale), tensors, served)  # noqa: E731
    return dispatcher.attend(query, keys, values, tree_mask=tree_mask, remember=remember, **asked)[0]


def _refuse(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"`{name}` of flash_attn_with_kvcache is not served. Leave it out.")


def _lengths(given: Tensor | int | None, q: Tensor, cache: Tensor, table: Tensor | None) -> Tensor:
    """cache_seqlens as int32 [batch]; q is [batch, ...] and cache [entries, rows, ...]."""
    if table is not None:
        check_dimensions("[batch, max_pages]", block_table=table)
    if not isinstance(given, Tensor):
        rows = capacity_of(cache, table) if given is None else whole_number("cache_seqlens", given)
        return torch.full((q.shape[0],), rows, dtype=torch.int32, device=q.device)
    if given.dtype != torch.int32 or given.shape != (q.shape[0],):
        raise UsageError(
            f"`cache_seqlens` must be int32 [batch] with batch {q.shape[0]}, but got {given.dtype} "
            f"{tuple(given.shape)}. Convert it with cache_seqlens.to(torch.int32)."
        )
    return given


def _again(
    served: Served,
    number: int | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    given: Tensor | None,
    table: Tensor | None,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp of a call of a kind that was served before, in at most two launches.

    Args:
        given: cache_seqlens, or None where `number` says all lengths, or there is no such argument.
    """
    lengths, all_have = given, capacity_of(k_cache, table) if number is None else number
    if served.ahead is not None:
        lengths = torch.empty(q.shape[0], dtype=torch.int32, device=q.device)
        served.ahead(k_cache, v_cache, k, v, given, table, lengths, all_have)
    elif lengths is None:
        lengths = torch.full((q.shape[0],), all_have, dtype=torch.int32, device=q.device)
    tensors = [lengths] if table is None else [lengths, table]
    if slopes is not None:
        tensors.insert(0, slopes if slopes.dim() == 2 else slopes.unsqueeze(0))
    return served(q, k_cache, v_cache, *tensors)


def _append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    after: Tensor,
    given: Tensor | None,
    all_have: int,
    table: Tensor | None,
) -> Launch | None:
    """Write new rows [batch, new, ...] into the caches, which hold `after` rows per entry then; before, `given` per
    entry, or without it all_have in each.

    Returns:
        what does so again in one launch for such tensors; None where it takes several.
    """
    tensors = (k_cache, v_cache, k, v)
    if k.device.type != "cuda" or trace_obstacle(*tensors) or append_obstacle(*tensors) or is_capturing(k):
        for cache, new in ((k_cache, k), (v_cache, v)):
            _append_rows(cache, new, after - new.shape[1], table)
        return None
    launch = AppendLaunch(capacity_of(k_cache, table), 0 if table is None else k_cache.shape[1])
    with torch.cuda.device_of(k):
        short = launch.pinned(*tensors, given, table, torch.empty_like(after), all_have)
    return on_its_device(short, k.device.index)


def capacity_of(cache: Tensor, table: Tensor | None) -> int:
    """Keys that an entry has room for; cache [entries or pages, rows, ...]."""
    return int(cache.shape[1]) if table is None else int(table.shape[1] * cache.shape[1])


def _append_rows(cache: Tensor, new: Tensor, lengths: Tensor, table: Tensor | None) -> None:
    """Write new rows [batch, new, ...] after the present ones, whose number `lengths` gives per entry."""
    entries = torch.arange(new.shape[0], device=new.device)[:, None]
    places = lengths.long()[:, None] + torch.arange(new.shape[1], device=new.device)[None]
    if table is None:
        cache[entries, places] = new
    else:
        cache[table.long()[entries, places // cache.shape[1]], places % cache.shape[1]] = new


def _asked(
    query: Tensor, k_cache: Tensor, lengths: Tensor, table: Tensor | None, scale: float | None, *, causal: bool
) -> dict[str, Any]:
    """What every call over a cache asks for; query is [batch, num_heads, seqlen_q, head_dim]."""
    page_size = 0 if table is None else k_cache.shape[1]
    return {
        "causal": Causal.LOWER_RIGHT if causal else Causal.NONE,
        "scale": scale_of(query, None if scale is None else real_number("softmax_scale", scale)),
        "cache_seqlens": lengths,
        "block_table": table,
        "page_size": page_size,
        "lengths": (query.shape[0], query.shape[2], capacity_of(k_cache, table)),
    }


def _check_cache(query: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor | None) -> None:
    """query [batch, num_heads, seqlen_q, head_dim]; the caches as `flash_attn_with_kvcache` takes them.

    Raises:
        UsageError: they do not fit each other, a block table is invalid, or a gradient is needed.
    """
    if needs_gradients(query, k_cache, v_cache):
        raise UsageError(
            "Attention over a cache computes no gradients, but a tensor requires one. Call it under torch.no_grad(), "
            "or another entry point."
        )
    wanted = (query.shape[0],)
    if table is not None and (table.dtype != torch.int32 or table.shape[:1] != wanted):
        raise UsageError(
            f"`block_table` must be int32 [batch, max_pages] with batch {query.shape[0]}, but got {table.dtype} "
            f"{tuple(table.shape)}. Convert it, or give a row for every sequence."
        )
    if table is not None and k_cache.shape[1] & (k_cache.shape[1] - 1):
        raise UsageError(f"Pages must hold a power of two of keys, but got {k_cache.shape[1]}. Take 16 to 256.")
    caches = [cache.transpose(1, 2) for cache in (k_cache, v_cache)]
    if table is not None:
        caches = [cache[:1].expand(query.shape[0], -1, -1, -1) for cache in caches]
    check_sizes(query, *caches, names="queries and caches")

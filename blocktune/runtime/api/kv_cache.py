"""Attention over a cache of keys and values, contiguous or paged: decoding, and trees of drafts."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from blocktune.kernels.values.errors import UsageError, require_type
from blocktune.kernels.values.features import UNLIMITED
from blocktune.kernels.values.shape import Causal
from blocktune.kernels.values.tree_mask import KERNEL_DRAFTS, WORD_BITS
from blocktune.runtime.api.cache.appending import append, append_in_one, capacity_of, new_rows, positions_from
from blocktune.runtime.api.cache.checks import check_cache
from blocktune.runtime.api.cache.descales import Descale, Descales, as_kernels_take, tensor_of
from blocktune.runtime.api.cache.rotary import Rotary
from blocktune.runtime.api.cache.rows import CacheRows
from blocktune.runtime.api.flash_arguments import (
    real_number,
    sides,
    splits_of,
    whole_number,
    window_of,
    with_dense_rows,
)
from blocktune.runtime.api.wide_tree import wide_tree_attention
from blocktune.runtime.dispatch.autograd import KernelCall
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.call_checks import (
    check_dimensions,
    check_sinks,
    check_slopes,
    check_softcap,
)
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention
from blocktune.runtime.dispatch.launches.dtensors import refuse_distributed
from blocktune.runtime.dispatch.launches.launch_replays import RepeatedLaunch
from blocktune.runtime.dispatch.launches.layout import Layout
from blocktune.runtime.dispatch.sdpa_arguments import scale_of

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
    k_descale: Descale = None,
    v_descale: Descale = None,
    dispatcher: Dispatcher = attention,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of new queries over a cache, with FlashAttention-2's arguments and meaning. Inference only.

    q [batch, seqlen_q, num_heads, head_dim]; k_cache and v_cache [entries, seqlen_k, num_heads_kv, head_dim(_v)], or
    with block_table (int32 [batch, max_pages]) pages [num_pages, page_size, num_heads_kv, head_dim(_v)]. cache_seqlens:
    int32 [batch], the rows of every entry that are filled, or one number for all; the whole cache by default.
    cache_batch_idx: int32 [batch], the cache's entry of each batch entry, which must differ where k is given;
    cache_leftpad: int32 [batch], how many of the filled rows hold no key, counted from the first. Both are for caches
    without pages.

    k and v [batch, new, num_heads_kv, head_dim(_v)] are first written into the cache after what is there. rotary_cos
    and rotary_sin [positions, width / 2] turn them, and the queries, by their positions: new key i is at cache_seqlens
    + i, and so is query i, unless neither causal nor a window narrower than the cache tells queries apart; then all are
    at cache_seqlens.

    causal aligns to the last key, and so do window_size (left, right) and alibi_slopes (float32 [num_heads] or [batch,
    num_heads]); softcap 0 means no softcap. num_splits: 0 takes the tuned config with its splits of the keys; 1 to 128,
    rounded up to a power of two, takes a config that depends on the sizes of an entry only, so that its result is
    the same to the bit whatever else is in the batch. s_aux [num_heads]: attention sinks, as in `flash_attn_func`.

    Caches of torch.float8_e4m3fn or torch.int8 under queries of 16 bits stand for their numbers times k_descale and
    v_descale: a number, or float32 [num_heads_kv], [batch, num_heads_kv] or, one for every token, [entries or pages,
    rows, num_heads_kv]; 1 for e4m3 unless given. k and v, of the queries' type, are divided by them, rounded and
    clamped; with scales of tokens none are taken.

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
    cache_seqlens, block_table, alibi_slopes = map(with_dense_rows, (cache_seqlens, block_table, alibi_slopes))
    numbers = softmax_scale, causal, sides(window_size), softcap, num_splits, return_softmax_lse
    way, given = ("flash_attn_with_kvcache", *numbers), cache_seqlens if isinstance(cache_seqlens, Tensor) else None
    scales = tensor_of("k_descale", k_descale, q), tensor_of("v_descale", v_descale, q)
    tensors = (q, k_cache, v_cache, k, v, given, block_table, alibi_slopes, *scales, s_aux)
    number = None if given is cache_seqlens else whole_number("cache_seqlens", cache_seqlens)
    stays = rotary_cos is None and rotary_sin is None and cache_batch_idx is None and cache_leftpad is None
    bound = dispatcher.find_call(way, *tensors) if stays and not is_compiling() else None
    if bound is not None:
        out, lse = _replay_cache_call(bound, number, *tensors)
        return (out, lse) if return_softmax_lse else out
    check_dimensions("[batch, seqlen, heads, dim]", q=q, k_cache=k_cache, v_cache=v_cache)
    rows = CacheRows.of(q, cache_batch_idx, cache_leftpad, block_table)
    descales = Descales.of(q, k_cache, v_cache, *scales)
    new = new_rows(k, v, q, k_cache, v_cache)
    lengths = _lengths(cache_seqlens, q, rows.capacity(k_cache), 0 if new is None else new[0].shape[1])
    rotary = Rotary.of(rotary_cos, rotary_sin, rotary_interleaved, q, k, rows.capacity(k_cache))
    window, filled = window_of(window_size), lengths
    if rotary is not None:
        is_local = causal or any(UNLIMITED < side < rows.capacity(k_cache) for side in window)
        q = rotary.turned(q, positions_from(filled, q.shape[1] if is_local else 1))
    query, slopes = q.transpose(1, 2), check_slopes(alibi_slopes, q.shape[0], q.shape[2], q)
    softcap = real_number("softcap", softcap)
    check_softcap(softcap)
    k_pages, v_pages, table = rows.as_pages(k_cache, v_cache)
    sinks = check_sinks(s_aux, query.shape[1], query)
    check_cache(query, k_pages, v_pages, table, descales, (k, v, rotary_cos, rotary_sin, slopes, *scales, sinks))
    if new is not None or rows.index is not None or rows.padding is not None:
        refuse_distributed(q, "A cache with new rows, cache_batch_idx or cache_leftpad")
    if new is not None:
        if descales is not None:
            descales.check_new(new, q)
        lengths = lengths + new[0].shape[1]
    if cache_leftpad is not None:
        _check_room(dispatcher, query, (k_cache, v_cache), lengths)
        lengths = lengths - cache_leftpad
    asked = _call_options(query, k_pages, lengths, table, softmax_scale, causal=causal)
    asked |= {"window": window, "softcap": softcap, "alibi_slopes": slopes, "num_splits": splits_of(num_splits)}
    asked["sinks"] = sinks
    if descales is not None:
        paged = descales.as_pages(rows)
        asked |= {"scale_k": paged.k, "scale_v": paged.v}
    keys, values = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    ahead, repeats = None, stays and table is block_table
    if new is not None:
        if not is_compiling():
            dispatcher.check(query, keys, values, Call.of(**asked).over(query, keys))
        all_have = rows.capacity(k_cache) if number is None else number
        ahead = (
            append_in_one(k_cache, v_cache, *new, lengths, given, all_have, block_table, descales) if repeats else None
        )
        if ahead is None:
            append(rows, (k_cache, v_cache), new, filled, rotary, descales)
            k_pages, v_pages, _ = rows.as_pages(k_cache, v_cache)  # those of before may be copies without the new rows
            keys, values = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
        elif given is not None:  # else the number of rows may be another one next time
            ahead = RepeatedLaunch(ahead)
    remember = None
    if repeats and (new is None or ahead is not None):
        remember = lambda fast_path, bound: fast_path.add(way, tensors, bound.with_layout(Layout.LENGTH_FIRST, ahead))  # noqa: E731
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
    """Score drafts of speculative decoding: every query sees the cache before the drafts, and of these what its bits
    say.

    query [batch, num_heads, drafts, head_dim]; the caches as `flash_attn_with_kvcache` takes them, with the drafts' own
    keys the last of each entry's cache_seqlens (int32 [batch]). tree_mask int32 [batch, drafts, ceil(drafts / 32)], as
    `tree_words` makes one for each entry. dispatcher: whose configs serve the call.

    Raises:
        UsageError: sizes or data types do not fit, a table points outside, or gradients are needed.
        TooFewDimensionsError: the query or a cache has fewer than four dimensions.
        WrongTypeError: an argument is no tensor.
    """
    cache_seqlens, block_table, tree_mask = map(with_dense_rows, (cache_seqlens, block_table, tree_mask))
    tensors = (query, key_cache, value_cache, cache_seqlens, block_table, tree_mask)
    bound = None if is_compiling() else dispatcher.find_call(("tree_attention", scale), *tensors)
    if bound is not None:
        keys, values = Layout.LENGTH_FIRST.to_heads_first(key_cache, value_cache)
        return bound(query, keys, values, *(tensor for tensor in tensors[3:] if tensor is not None))[0]
    check_dimensions("[batch, heads, drafts, dim]", query=query)
    check_dimensions("[batch, seqlen, heads, dim]", key_cache=key_cache, value_cache=value_cache)
    require_type("tree_mask", tree_mask, Tensor, "Stack tree_words(parents) of every entry.")
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
    check_cache(query, k_pages, v_pages, table)
    asked = _call_options(query, k_pages, lengths, table, scale, causal=False)
    keys, values = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    # PyTorch computes float64 in one part: the float32 log-sum-exps of two would cost its accuracy
    if drafts > KERNEL_DRAFTS and query.dtype is not torch.float64:
        if not is_compiling():
            dispatcher.check(query, keys, values, Call.of(tree_mask=tree_mask, **asked).over(query, keys))
        return wide_tree_attention(query, k_pages, v_pages, tree_mask, asked, dispatcher)
    remember = None
    if table is block_table:
        remember = lambda fast_path, bound: fast_path.add(("tree_attention", scale), tensors, bound)  # noqa: E731
    return dispatcher.attend(query, keys, values, tree_mask=tree_mask, remember=remember, **asked)[0]


def _check_number(number: int, capacity: int, new: int) -> None:
    """Check the rows that all entries have, in every call: the host knows their number.

    Raises:
        UsageError: it is negative, or the cache has no room for it and the new rows.
    """
    if not 0 <= number <= capacity - new:
        raise UsageError(
            f"`0 <= cache_seqlens <= {capacity - new}` must hold with {new} new rows, but got {number}. The cache, or "
            "the pages in a row of block_table, hold no more; make it larger."
        )


def _lengths(given: Tensor | int | None, q: Tensor, capacity: int, new: int = 0) -> Tensor:
    """Return cache_seqlens as int32 [batch]; q is [batch, ...]. new: rows that come after them."""
    if not isinstance(given, Tensor):
        rows = capacity if given is None else whole_number("cache_seqlens", given)
        if given is not None:
            _check_number(rows, capacity, new)
        return torch.full((q.shape[0],), rows, dtype=torch.int32, device=q.device)
    if given.dtype != torch.int32 or given.shape != (q.shape[0],):
        raise UsageError(
            f"`cache_seqlens` must be int32 [batch] with batch {q.shape[0]}, but got {given.dtype} "
            f"{tuple(given.shape)}. Convert it with cache_seqlens.to(torch.int32)."
        )
    return given


def _replay_cache_call(
    bound: KernelCall,
    number: int | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    given: Tensor | None,
    table: Tensor | None,
    slopes: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output and log-sum-exp of a call of a kind that was served before, in at most two launches.

    Args:
        given: cache_seqlens, or None where `number` says all lengths, or there is no such argument.
    """
    if number is not None:
        _check_number(number, capacity_of(k_cache, table), 0 if k is None else k.shape[1])
    lengths, scales = given, [None if scale is None else as_kernels_take(scale) for scale in (k_scale, v_scale)]
    if bound.ahead is not None:
        lengths = torch.empty(q.shape[0], dtype=torch.int32, device=q.device)
        others = scales if k_cache.dtype is not q.dtype else ()
        bound.ahead(k_cache, v_cache, k, v, given, table, *others, lengths, _rows_of_all(number, k_cache, table))
    elif lengths is None:
        lengths = torch.full((q.shape[0],), _rows_of_all(number, k_cache, table), dtype=torch.int32, device=q.device)
    tensors = [lengths] if table is None else [lengths, table]
    if slopes is not None:
        tensors.insert(0, slopes if slopes.dim() == 2 else slopes.unsqueeze(0))
    tensors += [scale for scale in scales if scale is not None]
    if sinks is not None:
        tensors.append(sinks)
    return bound(q, k_cache, v_cache, *tensors)


def _rows_of_all(number: int | None, k_cache: Tensor, table: Tensor | None) -> int:
    """Return the rows that every entry of a cache has: by default as many as it has room for."""
    return capacity_of(k_cache, table) if number is None else number


def _check_room(dispatcher: Dispatcher, query: Tensor, caches: tuple[Tensor, Tensor], lengths: Tensor) -> None:
    """Check that a contiguous cache has room for the lengths.

    Raises:
        UsageError: a contiguous cache has fewer rows than the lengths, which count those of the padding, too.
    """
    if is_compiling():
        return
    sizes = (query.shape[0], query.shape[2], caches[0].shape[1])
    call = Call.of(causal=Causal.NONE, scale=1.0, cache_seqlens=lengths, lengths=sizes)
    dispatcher.check(query, caches[0].transpose(1, 2), caches[1].transpose(1, 2), call)


def _call_options(
    query: Tensor, k_cache: Tensor, lengths: Tensor, table: Tensor | None, scale: float | None, *, causal: bool
) -> dict[str, Any]:
    """Return what every call over a cache asks for; query is [batch, num_heads, seqlen_q, head_dim]."""
    page_size = 0 if table is None else k_cache.shape[1]
    return {
        "causal": Causal.LOWER_RIGHT if causal else Causal.NONE,
        "scale": scale_of(query, None if scale is None else real_number("softmax_scale", scale)),
        "cache_seqlens": lengths,
        "block_table": table,
        "page_size": page_size,
        "lengths": (query.shape[0], query.shape[2], capacity_of(k_cache, table)),
    }

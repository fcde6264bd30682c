"""Attention over a cache of keys and values, contiguous or paged: decoding, and trees of drafts."""

import torch
from torch import Tensor

from blocktune.kernels.engine import attend, shape_of_call
from blocktune.kernels.errors import UsageError
from blocktune.kernels.extras import Extras
from blocktune.kernels.features import UNLIMITED, Features, MaskKind
from blocktune.kernels.masked_math import masked_attention
from blocktune.kernels.shape import AttentionShape, Causal
from blocktune.kernels.tree_mask import WORD_BITS


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a cache, with FlashAttention-2's arguments and meaning. Inference only.

    q [batch, seqlen_q, num_heads, head_dim]; k_cache and v_cache [batch, seqlen_k, num_heads_kv, head_dim(_v)], or with
    block_table (int32 [batch, max_pages]) pages [num_pages, page_size, num_heads_kv, head_dim(_v)]. cache_seqlens:
    int32 [batch], the keys of every entry, or one number for all; the whole cache by default. k and v [batch, new,
    num_heads_kv, head_dim(_v)] are first written into the cache behind them. causal aligns to the last key. The tuned
    config says how many splits there are. Values of lengths and tables are checked at the first call of a kind.

    Returns:
        the output [batch, seqlen_q, num_heads, head_dim_v], and the log-sum-exp [batch, num_heads, seqlen_q] if asked.

    Raises:
        NotImplementedError: an argument is given that is not served (rotary, batch index, left padding, window, softcap
            and ALiBi over a cache, a fixed number of splits).
        UsageError: sizes or data types do not fit, a table points outside, or gradients are needed.
    """
    del rotary_interleaved
    _refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    _refuse(alibi_slopes=alibi_slopes, softcap=softcap or None, num_splits=num_splits or None)
    _refuse(window_size=None if tuple(window_size) == (UNLIMITED, UNLIMITED) else window_size)
    lengths = _lengths(cache_seqlens, q, k_cache, block_table)
    if k is not None and v is not None:
        check_table(block_table, q, k_cache)
        _append(k_cache, k, lengths, block_table)
        _append(v_cache, v, lengths, block_table)
        lengths = lengths + k.shape[1]
    elif k is not None or v is not None:
        raise UsageError("`k` and `v` are appended together, but only one is given. Give both or none.")
    out, lse = _attend_cache(
        q.transpose(1, 2), k_cache, v_cache, lengths, block_table, None, softmax_scale, causal=causal
    )
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
) -> Tensor:
    """Drafts of speculative decoding: every query sees the cache before the drafts, and of these what its bits say.

    query [batch, num_heads, drafts, head_dim]; the caches as `flash_attn_with_kvcache` takes them, with the drafts' own
    keys the last of each entry's cache_seqlens (int32 [batch]). tree_mask int32 [batch, drafts, ceil(drafts / 32)], as
    `tree_words` makes one for each entry.

    Raises:
        UsageError: sizes or data types do not fit, a table points outside, or gradients are needed.
    """
    batch, _, drafts, _ = query.shape
    wanted = (batch, drafts, -(-drafts // WORD_BITS))
    if tree_mask.shape != wanted or tree_mask.dtype != torch.int32:
        raise UsageError(
            f"`tree_mask` must be int32 [batch, drafts, ceil(drafts / 32)] = {wanted}, but got {tree_mask.dtype} "
            f"{tuple(tree_mask.shape)}. Stack tree_words(parents) of every entry."
        )
    lengths = _lengths(cache_seqlens, query.transpose(1, 2), key_cache, block_table)
    return _attend_cache(query, key_cache, value_cache, lengths, block_table, tree_mask, scale, causal=False)[0]


def check_table(block_table: Tensor | None, q: Tensor, k_cache: Tensor) -> None:
    """Raises:
    UsageError: a block table is no int32 [batch, max_pages], or names a page that is not there.
    """
    if block_table is None:
        return
    if block_table.dtype != torch.int32 or block_table.dim() != 2 or block_table.shape[0] != q.shape[0]:
        raise UsageError(
            f"`block_table` must be int32 [batch, max_pages] with batch {q.shape[0]}, but got {block_table.dtype} "
            f"{tuple(block_table.shape)}. Convert it, or give a row for every sequence."
        )
    low, high = (int(bound) for bound in torch.aminmax(block_table)) if block_table.numel() else (0, -1)
    if low < 0 or high >= k_cache.shape[0]:
        raise UsageError(
            f"`0 <= page < {k_cache.shape[0]}` must hold in block_table, but got pages {low} to {high}. "
            "Fill unused places with 0."
        )


def _refuse(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"`{name}` of flash_attn_with_kvcache is not served. Leave it out.")


def _lengths(given: Tensor | int | None, q: Tensor, cache: Tensor, table: Tensor | None) -> Tensor:
    """cache_seqlens as int32 [batch]; q is [batch, ...] and cache [entries, rows, ...]."""
    capacity = cache.shape[1] if table is None else table.shape[1] * cache.shape[1]
    if given is None or isinstance(given, int):
        return torch.full((q.shape[0],), capacity if given is None else given, dtype=torch.int32, device=q.device)
    if given.dtype != torch.int32 or given.shape != (q.shape[0],):
        raise UsageError(
            f"`cache_seqlens` must be int32 [batch] with batch {q.shape[0]}, but got {given.dtype} "
            f"{tuple(given.shape)}. Convert it with cache_seqlens.to(torch.int32)."
        )
    return given


def _append(cache: Tensor, new: Tensor, lengths: Tensor, table: Tensor | None) -> None:
    """Writes new rows [batch, new, ...] behind the lengths."""
    entries = torch.arange(new.shape[0], device=new.device)[:, None]
    places = lengths.long()[:, None] + torch.arange(new.shape[1], device=new.device)[None]
    if table is None:
        cache[entries, places] = new
    else:
        cache[table.long()[entries, places // cache.shape[1]], places % cache.shape[1]] = new


def _attend_cache(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    table: Tensor | None,
    tree: Tensor | None,
    scale: float | None,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """query [batch, num_heads, seqlen_q, head_dim]: output and log-sum-exp."""
    page_size = 0 if table is None else k_cache.shape[1]
    capacity = k_cache.shape[1] if table is None else page_size * table.shape[1]
    features = Features(cached=True, page_size=page_size, mask=MaskKind.NONE if tree is None else MaskKind.TREE)
    shape = shape_of_call(
        query,
        k_cache.shape[2],
        capacity,
        v_cache.shape[3],
        Causal.LOWER_RIGHT if causal else Causal.NONE,
        features=features,
    )
    factor = query.shape[-1] ** -0.5 if scale is None else scale

    def check() -> None:
        check_table(table, query, k_cache)
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < 0 or longest > capacity:
            raise UsageError(
                f"`0 <= cache_seqlens <= {capacity}` must hold, but got lengths from {shortest} to {longest}. "
                "The cache holds no more; make it larger."
            )

    def mathematics() -> tuple[Tensor, Tensor]:
        key, value = (gathered(cache, table) for cache in (k_cache, v_cache))
        return masked_attention(query, key, value, seen_keys(shape, lengths, tree), factor)

    extras = Extras(cache_seqlens=lengths, block_table=table, tree_mask=tree)
    keys, values = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    return attend(shape, query, keys, values, extras, factor, check=check, mathematics=mathematics)


def gathered(cache: Tensor, table: Tensor | None) -> Tensor:
    """The cache as [batch, num_heads_kv, rows, dim]: itself, or the pages of every entry one behind the other."""
    rows = cache if table is None else cache[table.long()].flatten(1, 2)
    return rows.transpose(1, 2)


def seen_keys(shape: AttentionShape, lengths: Tensor, tree: Tensor | None) -> Tensor:
    """[batch, 1, seqlen_q, seqlen_k], True where the query sees the key of the cache."""
    device = lengths.device
    keys = torch.arange(shape.seqlen_k, device=device)[None, None]
    rows = torch.arange(shape.seqlen_q, device=device)[None, :, None]
    length = lengths.long()[:, None, None]
    seen = (keys < length).expand(-1, shape.seqlen_q, -1)
    if shape.causal is Causal.LOWER_RIGHT:
        seen = seen & (keys <= rows + length - shape.seqlen_q)
    if tree is not None:
        drafts = keys - (length - shape.seqlen_q)
        inside = drafts.clamp(0, shape.seqlen_q - 1).expand(-1, shape.seqlen_q, -1)
        words = tree.long().gather(2, inside // WORD_BITS)
        seen = seen & ((drafts < 0) | ((words >> inside % WORD_BITS & 1) != 0))
    return seen[:, None]

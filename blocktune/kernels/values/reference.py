"""Attention as its definition says it: the ground truth of every test, check and tuning run."""

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from blocktune.kernels.values.dropout import keep_mask, share_kept
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.features import NO_FEATURES, UNLIMITED, Features, MaskKind
from blocktune.kernels.values.shape import Causal

if TYPE_CHECKING:
    import torch

KNOWN_FEATURES = frozenset(
    ("window", "softcap", "alibi", "boolean", "additive", "dropout", "varlen", "cached", "paged")
)


def attention_reference(
    q: "torch.Tensor",
    k: "torch.Tensor",
    v: "torch.Tensor",
    *,
    causal: Causal = Causal.NONE,
    scale: float | None = None,
    dtype: "torch.dtype | None" = None,
    features: Features = NO_FEATURES,
    extras: Extras = NO_EXTRAS,
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Compute softmax(scale * q k^T) v and the natural log-sum-exp of every row (Vaswani et al., arXiv 1706.03762,
    equation 1).

    q [..., num_heads, seqlen_q, head_dim], k and v [..., num_heads_kv, seqlen_k, head_dim(_v)] with num_heads a
    multiple of num_heads_kv; scale is 1 / sqrt(head_dim) unless given. Computed in `dtype` (float32 unless given) on
    the tensors' device, with all seqlen_q * seqlen_k scores of every head in memory. A row without keys gives 0, -inf.
    With features the tensors have four dimensions, packed sequences (varlen) are [1, heads, tokens, dim], and keys and
    values of a cache in pages [pages, num_heads_kv, page_size, dim]. Autograd differentiates it.

    Returns:
        the output [..., num_heads, seqlen_q, head_dim_v] and the log-sum-exp [..., num_heads, seqlen_q], in `dtype`;
        of packed sequences the log-sum-exp [num_heads, tokens].

    Raises:
        UsageError: a feature is not one of `KNOWN_FEATURES`.
    """
    import torch

    if features.names - KNOWN_FEATURES:
        raise UsageError(
            f"The reference serves {', '.join(sorted(KNOWN_FEATURES))} alone, but got {features.label!r}. Turn other "
            "features into a boolean mask."
        )
    dtype = torch.float32 if dtype is None else dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group_size = q.shape[-3] // k.shape[-3]
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(group_size, dim=-3) for tensor in (k, v))
    if features.cached:
        return _attend_cached(q, k, v, causal, scale, features, extras)
    if features.varlen:
        return _attend_packed(q, k, v, causal, scale, features, extras)
    return _attention(q, k, v, causal, scale, features, extras)


def visible(
    seqlen_q: int,
    seqlen_k: int,
    causal: Causal,
    device: "torch.device",
    window: tuple[int, int] | None = None,
) -> "torch.Tensor":
    """Return [seqlen_q, seqlen_k], True where causal mask and window let the query see the key."""
    distance = _distance(seqlen_q, seqlen_k, causal, device)
    left, right = (UNLIMITED, UNLIMITED) if window is None else window
    seen = distance <= (seqlen_q + seqlen_k if causal is Causal.NONE else 0)
    if left != UNLIMITED:
        seen &= distance >= -left
    if right != UNLIMITED:
        seen &= distance <= right
    return seen


def _distance(seqlen_q: int, seqlen_k: int, causal: Causal, device: "torch.device") -> "torch.Tensor":
    """Return [seqlen_q, seqlen_k]: how many keys each key comes after the one on the query's diagonal."""
    import torch

    diagonal = 0 if causal is Causal.UPPER_LEFT else seqlen_k - seqlen_q
    queries, keys = (torch.arange(length, device=device) for length in (seqlen_q, seqlen_k))
    return keys - (queries[:, None] + diagonal)


def _attention(
    q: "torch.Tensor",
    k: "torch.Tensor",
    v: "torch.Tensor",
    causal: Causal,
    scale: float,
    features: Features,
    extras: Extras,
    number: int = 0,
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Compute attention with as many key heads as query heads. number: that of the first batch entry, for dropout."""
    import torch

    scores = _scores(q @ k.transpose(-1, -2) * scale, causal, features, extras)
    lse = torch.logsumexp(scores, -1)
    blind = lse.isneginf().unsqueeze(-1)
    # next to the least finite number of a mask a log-sum-exp says nothing of how many keys there are
    probabilities = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    if features.dropout:
        batch, heads, seqlen_q, seqlen_k = scores.shape
        drawn = (extras.dropout_p, extras.seed, extras.offset, q.device)
        keep = keep_mask(batch, heads, seqlen_q, seqlen_k, *drawn, first_batch=number)
        probabilities = probabilities * keep / share_kept(extras.dropout_p)
    return probabilities @ v, lse


def _scores(scores: "torch.Tensor", causal: Causal, features: Features, extras: Extras) -> "torch.Tensor":
    """Return the scaled products with everything that the features add to them, -inf where the pair takes no part."""
    seqlen_q, seqlen_k = scores.shape[-2:]
    if features.softcap:
        scores = extras.softcap * (scores / extras.softcap).tanh()
    if features.alibi:
        assert extras.alibi_slopes is not None
        distance = _distance(seqlen_q, seqlen_k, causal, scores.device).abs()
        scores = scores - extras.alibi_slopes.to(scores)[..., None, None] * distance
    if features.mask is not MaskKind.NONE:
        assert extras.mask is not None
        hidden = extras.mask.isneginf() if features.mask is MaskKind.ADDITIVE else ~extras.mask
        if features.mask is MaskKind.ADDITIVE:
            scores = scores + extras.mask.to(scores)
        scores = scores.masked_fill(hidden, float("-inf"))  # for -inf once more: a gradient of 0 instead of NaN
    if causal is Causal.NONE and features.window is None:
        return scores
    seen = visible(seqlen_q, seqlen_k, causal, scores.device, features.window)
    return scores.masked_fill(~seen, float("-inf"))


def _attend_packed(
    q: "torch.Tensor",
    k: "torch.Tensor",
    v: "torch.Tensor",
    causal: Causal,
    scale: float,
    features: Features,
    extras: Extras,
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Compute attention sequence by sequence; tokens outside all of them get 0 and -inf."""
    assert extras.cu_seqlens_q is not None
    assert extras.cu_seqlens_k is not None
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full(q.shape[1:-1], float("-inf"))
    bounds_q, bounds_k = extras.cu_seqlens_q.tolist(), extras.cu_seqlens_k.tolist()
    for number in range(len(bounds_q) - 1):
        queries, keys = slice(*bounds_q[number : number + 2]), slice(*bounds_k[number : number + 2])
        own = _extras_of(extras, number, queries.stop - queries.start, keys.stop - keys.start)
        parts = q[:, :, queries], k[:, :, keys], v[:, :, keys]
        part, part_lse = _attention(*parts, causal, scale, features, own, number)
        out[:, :, queries] = part
        lse[:, queries] = part_lse[0]
    return out, lse


def _attend_cached(
    q: "torch.Tensor",
    k: "torch.Tensor",
    v: "torch.Tensor",
    causal: Causal,
    scale: float,
    features: Features,
    extras: Extras,
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Compute attention over the keys that the entries of a cache have, as packed sequences."""
    import torch

    assert extras.cache_seqlens is not None
    lengths, device = extras.cache_seqlens.tolist(), extras.cache_seqlens.device
    k, v = (_keys_of_entries(cache, lengths, extras.block_table) for cache in (k, v))
    extras = replace(extras, cu_seqlens_k=torch.tensor([0, *accumulate(lengths)], device=device))
    if features.varlen:
        return _attend_packed(q, k, v, causal, scale, features, extras)
    batch, _, rows, _ = q.shape
    extras = replace(extras, cu_seqlens_q=torch.arange(batch + 1, device=device) * rows)
    packed = q.transpose(0, 1).flatten(1, 2)[None]
    out, lse = _attend_packed(packed, k, v, causal, scale, features, extras)
    return out[0].unflatten(1, (batch, rows)).transpose(0, 1), lse.unflatten(1, (batch, rows)).transpose(0, 1)


def _keys_of_entries(cache: "torch.Tensor", lengths: list[int], table: "torch.Tensor | None") -> "torch.Tensor":
    """Return the rows [1, heads, rows of all entries, dim] that the entries of a cache have."""
    import torch

    if table is None:
        return torch.cat([cache[entry, :, :length] for entry, length in enumerate(lengths)], -2)[None]
    size = cache.shape[2]
    pages = [cache[table[entry, : -(-length // size)].long()] for entry, length in enumerate(lengths)]
    rows = [own.transpose(0, 1).flatten(1, 2)[:, :length] for own, length in zip(pages, lengths, strict=True)]
    return torch.cat(rows, -2)[None]


def _extras_of(extras: Extras, number: int, seqlen_q: int, seqlen_k: int) -> Extras:
    """Return the mask and the slopes of one packed sequence."""
    mask, slopes = extras.mask, extras.alibi_slopes
    if mask is not None:
        mask = mask[number if mask.shape[0] > 1 else 0][None, :, :seqlen_q, :seqlen_k]
    if slopes is not None:
        slopes = slopes[number if slopes.shape[0] > 1 else 0][None]
    return replace(extras, mask=mask, alibi_slopes=slopes)

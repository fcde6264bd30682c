"""A few rows of attention by its definition in float64, with every feature of a call, for first uses to be compared to.

No more than `MOST_PAIRS` scores of a head are in memory, whatever the lengths are, and keys and values are widened part
by part.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from blocktune.kernels.values.dropout import keep_threshold, pair_numbers, share_kept
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import UNLIMITED, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.kernels.values.tree_mask import WORD_BITS

ROWS = 64
"""Queries of a head that are compared, spread over its length."""
MOST_PAIRS = 1 << 20
"""Scores of a head in memory at once: fewer rows of longer sequences are compared."""
PART = 1 << 14
"""Keys that are float64 at once."""
MOST_ON_CPU = 1 << 21
"""Numbers among the keys of a head up to which the processor computes the reference: 0.2 s of one core at most. The
first product in float64 on a GPU takes 0.3 s, in which cuBLAS is set up."""
LOWEST_MASK = -(2.0**21)
"""Finite numbers of an additive mask below it hide a key (kernels/portable/forward/masked_rows.py)."""
BESIDE = 64.0
"""How far below a row's maximum a score may be before its own rounding no longer counts."""


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """One head's keys or values, [keys, dim] in any type, and what multiplies them: one number, or one a key."""

    stored: Tensor
    factor: Tensor | None = None

    def to(self, device: torch.device) -> "ScaledRows":
        """Return the same numbers on a device."""
        return ScaledRows(self.stored.to(device), None if self.factor is None else self.factor.to(device))

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the places of some keys with their numbers in float64."""
        for begin in range(0, self.stored.shape[0], PART):
            places = slice(begin, begin + PART)
            wide = self.stored[places].double()
            if self.factor is not None:
                wide = wide * (self.factor.double() if self.factor.dim() == 0 else self.factor[places, None].double())
            yield places, wide

    def products(self, rows: Tensor, change: Callable[[Tensor], Tensor] = lambda part: part) -> Tensor:
        """Return rows [rows, dim] times the numbers, [rows, keys]."""
        found = [rows @ change(part).T for _, part in self.parts()]
        return torch.cat(found, -1) if found else rows.new_zeros(rows.shape[0], 0)

    def sums(self, weights: Tensor, change: Callable[[Tensor], Tensor] = lambda part: part) -> Tensor:
        """Return the sums of the numbers with these weights [rows, keys], [rows, dim]."""
        total = weights.new_zeros(weights.shape[0], self.stored.shape[1])
        for places, part in self.parts():
            total += weights[:, places] @ change(part)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSample:
    """Rows of one head: the head's number, its number among key heads, the index of the batch entry in the tensors, the
    rows and keys there; the row's scores, weights and all, in float64.

    All tensors but those of a launch are on the device that computes the reference (`device`).

    scores [rows, keys] are final. size [rows, 1]: of what is added up for the scores that count, by which these are
    rounded. derivative: of the soft cap. kept: None, or what dropout leaves of each weight, 0 or 1 / share. lse [rows]
    includes the sinks.
    """

    entry: int
    head: int
    kv_head: int
    places: Tensor
    keys: slice
    query: Tensor
    key: ScaledRows
    value: ScaledRows
    weights: Tensor
    size: Tensor
    derivative: Tensor
    kept: Tensor | None
    lse: Tensor

    @property
    def device(self) -> torch.device:
        """The device that computes the reference."""
        return self.query.device

    @property
    def dropped_weights(self) -> Tensor:
        """What the values are multiplied with."""
        return self.weights if self.kept is None else self.weights * self.kept


@dataclass(frozen=True, slots=True)
class Sequence:
    """One batch entry: its number, its index in the queries and in the keys, and the queries and keys that are its
    own."""

    number: int
    entry: int
    key_entry: int
    queries: slice
    keys: slice

    @classmethod
    def ends(cls, shape: AttentionShape, extras: Extras) -> list[Self]:
        """Return the first and the last entry that has queries."""
        queries, keys = [slice(0, shape.seqlen_q)] * shape.batch, [slice(0, shape.seqlen_k)] * shape.batch
        packed, packed_keys = extras.cu_seqlens_q is not None, extras.cu_seqlens_k is not None
        if extras.cu_seqlens_q is not None:
            queries = [slice(*bounds) for bounds in pairwise(extras.cu_seqlens_q.tolist())]
        if extras.cu_seqlens_k is not None:
            keys = [slice(*bounds) for bounds in pairwise(extras.cu_seqlens_k.tolist())]
        if extras.cache_seqlens is not None:
            keys = [slice(0, length) for length in extras.cache_seqlens.tolist()]
        entries = [
            cls(n, 0 if packed else n, 0 if packed_keys else n, *own)
            for n, own in enumerate(zip(queries, keys, strict=True))
            if own[0].stop > own[0].start
        ]
        return entries[:: max(len(entries) - 1, 1)]


def samples(
    shape: AttentionShape, extras: Extras, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> list[RowSample]:
    """Return rows of the first and the last head of a call with these tensors."""
    ends = Sequence.ends(shape, extras)
    pairs = list(zip(ends, (0, shape.num_heads - 1), strict=False))
    if len(ends) == 1 and shape.num_heads > 1:
        pairs.append((ends[0], shape.num_heads - 1))
    return [_sample(shape, extras, sequence, head, query, key, value, scale) for sequence, head in pairs]


def _sample(
    shape: AttentionShape,
    extras: Extras,
    sequence: Sequence,
    head: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
) -> RowSample:
    kv_head, length = head // shape.group_size, sequence.queries.stop - sequence.queries.start
    keys, values = (
        _numbers(tensor, factor, extras.block_table, sequence, kv_head)
        for tensor, factor in ((key, extras.scale_k), (value, extras.scale_v))
    )
    device = query.device if keys.stored.numel() > MOST_ON_CPU else torch.device("cpu")
    keys, values = keys.to(device), values.to(device)
    count = min(ROWS, length, max(1, MOST_PAIRS // max(keys.stored.shape[0], 1)))
    rows = torch.linspace(0, length - 1, count, device=device).long().unique()
    places = rows + sequence.queries.start
    queries = query[sequence.entry, head, places].to(device).double()
    if extras.scale_q is not None:
        queries = queries * _of_head(extras.scale_q, sequence.number, head).to(device).double()
    products, terms = keys.products(queries) * scale, keys.products(queries.abs(), torch.abs) * abs(scale)
    scores, size, derivative = _scores(shape, extras, sequence, head, rows, products, terms)
    lse = _log_sum_exp(scores)
    blind = lse.isneginf()[:, None]
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    if extras.sinks is not None:
        joined = torch.logaddexp(lse, extras.sinks[head].to(device).double())
        weights = weights * (lse - joined).nan_to_num(nan=0.0).exp()[:, None]
        lse = joined
    return RowSample(
        entry=sequence.entry, head=head, kv_head=kv_head, places=places, keys=sequence.keys, query=queries, key=keys,
        value=values, weights=weights, size=size, derivative=derivative,
        kept=_dropout_weights(shape, extras, sequence, head, rows, scores.shape[1]), lse=lse,
    )  # fmt: skip


def _log_sum_exp(scores: Tensor) -> Tensor:
    """Return the rows' log-sum-exp as the kernels leave it, also where a mask hides rows by finite numbers."""
    lse = scores.logsumexp(-1)
    keys = (scores - lse.masked_fill(lse.isneginf(), 0.0)[:, None]).exp().sum(-1)
    return torch.where((lse < -1e37) & ~lse.isneginf(), ((keys.log2() + 1) / 4096 - 2) * 2.0**127, lse)


def _numbers(tensor: Tensor, factor: Tensor | None, table: Tensor | None, sequence: Sequence, head: int) -> ScaledRows:
    """Return the keys or values of one head that a sequence has."""
    keys, by_token = sequence.keys, factor is not None and factor.dim() == 3
    if table is None:
        own = tensor[sequence.key_entry, head, keys]
        of_tokens = factor[sequence.key_entry, keys, head] if by_token and factor is not None else None
    else:
        pages = table[sequence.number, : -(-keys.stop // tensor.shape[2])].long()
        stored = tensor.view(torch.int8) if tensor.element_size() == 1 else tensor  # no device indexes all 8-bit types
        own = stored[pages, head].flatten(0, 1)[keys].view(tensor.dtype)
        of_tokens = factor[pages, :, head].flatten()[keys] if by_token and factor is not None else None
    if factor is None or by_token:
        return ScaledRows(own, of_tokens)
    return ScaledRows(own, _of_head(factor, sequence.number, head))


def _of_head(values: Tensor, number: int, head: int) -> Tensor:
    """Return what a tensor [batch or 1, heads or 1, ...] has for a head."""
    return values[number if values.shape[0] > 1 else 0, head if values.shape[1] > 1 else 0]


def _scores(
    shape: AttentionShape, extras: Extras, sequence: Sequence, head: int, rows: Tensor, scores: Tensor, size: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the final scores of rows, given the scaled products and the magnitudes that these add up; their size; and
    the soft cap's derivative."""
    distance = _distance(shape, sequence, rows, scores.shape[1])
    derivative = torch.ones_like(scores)
    if shape.features.softcap:
        bent = (scores / extras.softcap).tanh()
        scores, derivative = extras.softcap * bent, 1 - bent * bent
    if extras.alibi_slopes is not None:
        bias = _of_head(extras.alibi_slopes, sequence.number, head).to(scores.device).double() * distance.abs()
        scores, size = scores - bias, size + bias.abs()
    if extras.mask is not None:
        mask = _rows_of_mask(extras.mask, sequence.number, head, rows, scores.shape[1]).to(scores.device)
        if mask.dtype is torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        else:
            low = mask.isfinite() & (mask < LOWEST_MASK)
            mask = mask.double().masked_fill(low, -1e38)  # float64 keeps no score next to it
            scores, size = scores + mask, size + mask.masked_fill(low | mask.isneginf(), 0.0).abs()
    scores = scores.masked_fill(~_visible_keys(shape, extras, sequence, head, rows, distance), float("-inf"))
    if not scores.shape[1]:
        return scores, size.new_zeros(len(rows), 1), derivative
    counts = scores >= scores.amax(-1, keepdim=True) - BESIDE
    size = size.masked_fill(~counts, 0.0).amax(-1, keepdim=True)
    return scores, size, derivative


def _rows_of_mask(mask: Tensor, number: int, head: int, rows: Tensor, keys: int) -> Tensor:
    """Return [rows, keys] of a mask [batch or 1, heads or 1, seqlen_q or 1, seqlen_k]."""
    own = _of_head(mask, number, head)
    return (own[rows] if own.shape[0] > 1 else own.expand(len(rows), -1))[:, :keys]


def _distance(shape: AttentionShape, sequence: Sequence, rows: Tensor, keys: int) -> Tensor:
    """Return [rows, keys]: how many keys each key comes after the one on the row's diagonal."""
    length = sequence.queries.stop - sequence.queries.start
    diagonal = 0 if shape.causal is Causal.UPPER_LEFT else keys - length
    return torch.arange(keys, device=rows.device)[None, :] - (rows[:, None] + diagonal)


def _visible_keys(
    shape: AttentionShape, extras: Extras, sequence: Sequence, head: int, rows: Tensor, distance: Tensor
) -> Tensor:
    """Return [rows, keys], True where neither a bound nor a mask of blocks or drafts hides the key."""
    left, right = shape.features.window or (UNLIMITED, UNLIMITED)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if shape.causal is not Causal.NONE:
        seen &= distance <= 0
    elif right != UNLIMITED:
        seen &= distance <= right
    if left != UNLIMITED:
        seen &= distance >= -left
    if shape.features.mask is MaskKind.BLOCK_SPARSE:
        blocks = extras.block_mask
        active = _of_head(blocks.mask, sequence.number, head)[rows // blocks.block_q].to(rows.device)
        seen &= active.repeat_interleave(blocks.block_k, -1)[:, : distance.shape[1]]
    if extras.tree_mask is not None:
        words = extras.tree_mask[sequence.number, rows].to(rows.device).long()
        seen &= _in_tree(words, distance.shape[1], shape.seqlen_q)
    return seen


def _in_tree(words: Tensor, keys: int, drafts: int) -> Tensor:
    """Return [rows, keys], True for keys before the drafts, and for drafts whose bit is set in words [rows, words]."""
    draft = torch.arange(keys, device=words.device) - (keys - drafts)
    inside = draft.clamp(0, drafts - 1)
    return (draft < 0) | (words[:, inside // WORD_BITS] >> inside % WORD_BITS & 1 != 0)


def _dropout_weights(
    shape: AttentionShape, extras: Extras, sequence: Sequence, head: int, rows: Tensor, keys: int
) -> Tensor | None:
    """Return what dropout leaves of each weight, or None without dropout."""
    if not shape.features.dropout:
        return None
    number = torch.full((1, 1, 1), sequence.number * shape.num_heads + head, dtype=torch.int64, device=rows.device)
    numbers = pair_numbers(number, rows.view(1, -1, 1), keys, extras.seed, extras.offset)[0]
    return (numbers >= keep_threshold(extras.dropout_p)).double() / share_kept(extras.dropout_p)

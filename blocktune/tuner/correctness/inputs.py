"""Inputs of one shape as a launch gets them: tensors, and the extras that its features ask for.

Batch entries may differ in length: packed sequences (varlen) and entries of a cache. `CheckInputs.entry` gives one of
them as plain matrices, whatever the layout. Everything follows from the seed.
"""

import random
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import NO_FEATURES, MaskKind
from blocktune.kernels.values.shape import FP8, AttentionShape
from blocktune.kernels.values.short_numbers import BOUNDS, CACHE_TYPES, as_factor, quantize
from blocktune.kernels.values.tree_mask import tree_words

SOFTCAP = 30.0
DROPOUT = 0.1
DROPOUT_SEED = 0x5EED_0000_1234
MASK_VISIBLE = 0.75
"""The share of pairs that a boolean mask shows."""
MASK_BLOCK = 128
BLOCK_DENSITY = 0.25


@dataclass(frozen=True, slots=True)
class CheckInputs:
    """Query, key, value and extras of a shape; the lengths of every batch entry, all equal unless packed or cached."""

    shape: AttentionShape
    q: Any
    k: Any
    v: Any
    extras: Extras
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]

    def entry(self, number: int) -> tuple[Any, Any, Any]:
        """Return q [num_heads, rows, dim], k and v [num_heads_kv, keys, dim] of one batch entry; those of an 8-bit
        cache as the numbers that they stand for."""
        k, v = self._rows_of(self.k, number), self._rows_of(self.v, number)
        if self.shape.features.is_short:
            k, v = (
                rows.float() * self._factor(scale, number)
                for rows, scale in ((k, self.extras.scale_k), (v, self.extras.scale_v))
            )
        return self.of_queries(self.q, number), k, v

    def _rows_of(self, cache: Any, number: int) -> Any:
        """Return an entry's keys or values [num_heads_kv, keys, dim]."""
        if self.extras.block_table is None:
            return self.of_keys(cache, number)
        pages, length = self.extras.block_table[number].long(), self.lengths_k[number]
        return cache[pages].transpose(0, 1).flatten(1, 2)[:, :length]

    def _factor(self, scale: Any, number: int) -> Any:
        """Return what an entry's numbers of 8 bits are multiplied with, [num_heads_kv, keys or 1, 1]."""
        if self.shape.features.token_scales:
            return self._rows_of(as_factor(scale), number)
        return as_factor(scale)[number]

    def of_queries(self, tensor: Any, number: int) -> Any:
        """Return the part [num_heads, rows, ...] that belongs to an entry's queries, of a tensor or a log-sum-exp."""
        return self._part(tensor, number, self.lengths_q)

    def of_keys(self, tensor: Any, number: int) -> Any:
        """Return the part [num_heads_kv, keys, dim] that belongs to an entry's keys."""
        if self.shape.features.cached:
            return tensor[number][:, : self.lengths_k[number]]
        return self._part(tensor, number, self.lengths_k)

    def scaled(self, factor: float) -> "CheckInputs":
        """Return the same with the queries multiplied by a factor."""
        return replace(self, q=scaled_queries(self.q, factor))

    def diagonal(self, number: int) -> int:
        """Return the key that an entry's query 0 stands at."""
        return replace(self.shape, seqlen_q=self.lengths_q[number], seqlen_k=self.lengths_k[number]).diagonal

    @property
    def flops(self) -> int:
        """As `AttentionShape.flops`, by the true lengths and the active blocks in a block mask."""
        one = replace(self.shape, batch=1)
        lengths = tuple(zip(self.lengths_q, self.lengths_k, strict=True))
        each = {pair: replace(one, seqlen_q=pair[0], seqlen_k=pair[1]).flops for pair in set(lengths)}
        total = sum(each[pair] for pair in lengths)
        mask = self.extras.block_mask
        return total if mask is None else round(total * mask.density)

    @property
    def key_bytes(self) -> int:
        """Of the keys and values of all entries."""
        return key_bytes(self.shape, self.lengths_k)

    def _part(self, tensor: Any, number: int, lengths: tuple[int, ...]) -> Any:
        if not self.shape.features.varlen:
            return tensor[number][:, : lengths[number]]
        start = sum(lengths[:number])
        packed = tensor[0] if tensor.dim() == 4 else tensor
        return packed[:, start : start + lengths[number]]


def scaled_queries(q: Any, factor: float) -> Any:
    """Return q times a factor in its data type; 8-bit tensors have no product of their own."""
    return q * factor if q.element_size() > 1 else (q.float() * factor).to(q.dtype)


def key_bytes(shape: AttentionShape, lengths_k: tuple[int, ...] | None = None) -> int:
    """Return the bytes of keys and values of all entries, which have `lengths_k` keys where that is given."""
    keys = shape.batch * shape.seqlen_k if lengths_k is None else sum(lengths_k)
    return keys * shape.num_heads_kv * (shape.head_dim + shape.head_dim_v) * shape.kv_bytes


def make_inputs(shape: AttentionShape, *, device: str, seed: int) -> CheckInputs:
    """Return normally distributed tensors in the layout of the shape, with extras for its features."""
    generator, features = torch.Generator(device=device).manual_seed(seed), shape.features
    dice = random.Random(seed)
    lengths_q, lengths_k = _lengths(shape, dice)

    def normal(*sizes: int) -> Any:
        dtype, drawn = getattr(torch, shape.dtype), torch.bfloat16  # nothing draws 8 bits
        if shape.dtype != FP8:
            drawn = dtype
        return torch.randn(*sizes, dtype=drawn, device=device, generator=generator).to(dtype)

    rows: tuple[int, int] = (shape.batch, shape.seqlen_q)
    keys: tuple[int, int] = (shape.batch, shape.seqlen_k)
    if features.varlen:
        rows = 1, sum(lengths_q)
    if features.varlen and not features.cached:
        keys = 1, sum(lengths_k)
    if features.page_size:
        keys = (_pages(shape), features.page_size)
    q = normal(rows[0], shape.num_heads, rows[1], shape.head_dim)
    k = normal(keys[0], shape.num_heads_kv, keys[1], shape.head_dim)
    v = normal(keys[0], shape.num_heads_kv, keys[1], shape.head_dim_v)
    extras = _extras(shape, (lengths_q, lengths_k), generator, dice)
    if features.is_short:
        k, v, extras = _short_cache(shape, k, v, extras)
    return CheckInputs(shape, q, k, v, extras, lengths_q, lengths_k)


def _short_cache(shape: AttentionShape, k: Any, v: Any, extras: Extras) -> tuple[Any, Any, Extras]:
    """Return keys and values of 8 bits, with the scales that their largest numbers ask for: of every token and head, or
    of every head of the batch."""
    dtype = next(dtype for dtype, kind in CACHE_TYPES.items() if kind is shape.features.kv)
    found = []
    for cache in (k, v):
        if shape.features.token_scales:
            scale = cache.float().abs().amax(-1).transpose(1, 2).contiguous() / BOUNDS[dtype][1]
        else:
            of_heads = cache.float().abs().amax((0, 2, 3)) / BOUNDS[dtype][1]
            scale = of_heads.expand(shape.batch, -1).contiguous()
        factor = as_factor(scale if shape.features.token_scales else scale[:1])
        found.append((quantize(cache, factor, dtype), scale))
    (k, scale_k), (v, scale_v) = found
    return k, v, replace(extras, scale_k=scale_k, scale_v=scale_v)


def alibi_slopes(num_heads: int, device: str) -> Any:
    """Return float32 [1, num_heads]: 2^(-8 i / num_heads) for i from 1 (Press et al., arXiv 2108.12409, section 3)."""
    return torch.exp2(-8.0 * torch.arange(1, num_heads + 1, device=device, dtype=torch.float32) / num_heads)[None]


def _lengths(shape: AttentionShape, dice: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the queries and keys of every entry. The first is the longest; the others have at least half as many."""
    features, full_q, full_k = shape.features, (shape.seqlen_q,) * shape.batch, (shape.seqlen_k,) * shape.batch
    if not (features.varlen or features.cached):
        return full_q, full_k
    shares = [1.0] + [dice.uniform(0.5, 1.0) for _ in range(shape.batch - 1)]
    lengths_k = tuple(max(1, round(share * shape.seqlen_k)) for share in shares)
    if features.varlen:
        return tuple(max(1, round(share * shape.seqlen_q)) for share in shares), lengths_k
    return full_q, tuple(max(min(shape.seqlen_q, shape.seqlen_k), length) for length in lengths_k)


def _pages(shape: AttentionShape) -> int:
    return shape.batch * -(-shape.seqlen_k // shape.features.page_size)


def _extras(
    shape: AttentionShape, lengths: tuple[tuple[int, ...], tuple[int, ...]], generator: Any, dice: random.Random
) -> Extras:
    features, device = shape.features, generator.device
    if features == NO_FEATURES:
        return Extras()

    def indices(values: Any) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=device)

    packed = features.varlen, features.varlen and not features.cached
    starts = [
        indices([0, *accumulate(part)]) if is_packed else None for part, is_packed in zip(lengths, packed, strict=True)
    ]
    table = None
    if features.page_size:
        pages = torch.randperm(_pages(shape), generator=generator, device=device)
        table = pages.to(torch.int32).view(shape.batch, -1)
    return Extras(
        mask=_mask(shape, generator),
        alibi_slopes=alibi_slopes(shape.num_heads, device) if features.alibi else None,
        softcap=SOFTCAP if features.softcap else 0.0,
        dropout_p=DROPOUT if features.dropout else 0.0,
        seed=DROPOUT_SEED if features.dropout else 0,
        cu_seqlens_q=starts[0],
        cu_seqlens_k=starts[1],
        cache_seqlens=indices(lengths[1]) if features.cached else None,
        block_table=table,
        block_mask=_block_mask(shape, generator) if features.mask is MaskKind.BLOCK_SPARSE else None,
        tree_mask=_trees(shape, dice).to(device) if features.mask is MaskKind.TREE else None,
    )


def _mask(shape: AttentionShape, generator: Any) -> Any:
    """Return one mask for all heads and entries, as models have it; a boolean one in memory is half of an additive
    one."""
    kind = shape.features.mask
    if kind not in (MaskKind.BOOLEAN, MaskKind.ADDITIVE):
        return None
    sizes, device = (1, 1, shape.seqlen_q, shape.seqlen_k), generator.device
    if kind is MaskKind.BOOLEAN:
        return torch.rand(sizes, device=device, generator=generator) < MASK_VISIBLE
    return torch.randn(sizes, dtype=getattr(torch, shape.dtype), device=device, generator=generator)


def _block_mask(shape: AttentionShape, generator: Any) -> BlockMask:
    """Return random blocks for every query head; of every row at least one."""
    rows, columns = (-(-length // MASK_BLOCK) for length in (shape.seqlen_q, shape.seqlen_k))
    dice = torch.rand(1, shape.num_heads, rows, columns, device=generator.device, generator=generator)
    ranks = dice.argsort(-1).argsort(-1)  # the same number in every row, so that the density is what it should be
    return BlockMask(MASK_BLOCK, MASK_BLOCK, ranks < max(1, round(BLOCK_DENSITY * columns)))


def _trees(shape: AttentionShape, dice: random.Random) -> Any:
    """Return a random tree of drafts for every entry."""

    def parent(draft: int) -> int | None:
        return dice.choice((None, *range(draft))) if draft else None

    return torch.stack([tree_words([parent(draft) for draft in range(shape.seqlen_q)]) for _ in range(shape.batch)])

"""Shapes, tensors and extras of calls with features, for the tests of the kernels that serve them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, product
from typing import Any

import torch

from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.support.triton_modes import DEVICE

WORDS = ("window=20:9", "softcap", "alibi", "boolean", "additive", "dropout")
# one that only bounds the right side says nothing beside a causal mask
WINDOWS = [(window, Causal.NONE) for window in ((0, 0), (-1, 3), (3, -1), (40, 40), (0, 70), (300, 2))]
WINDOWS += list(product(((0, 0), (3, -1), (15, -1)), (Causal.UPPER_LEFT, Causal.LOWER_RIGHT)))
PAIRS = [" ".join(pair) for pair in combinations(WORDS, 2) if pair != ("boolean", "additive")]


def shape_of(features: str, **changes: Any) -> AttentionShape:
    base: dict[str, Any] = {"batch": 1, "num_heads": 2, "num_heads_kv": 1, "seqlen_q": 70, "seqlen_k": 90}
    base |= {"head_dim": 16, "dtype": "float32"} | changes
    return AttentionShape(**({"head_dim_v": base["head_dim"]} | base), features=Features.parse(features))


def extras_of(shape: AttentionShape, seed: int = 1) -> Extras:
    """Random extras; masks hide a fifth of the pairs, and the first key always, so that some rows may see none."""
    features, generator = shape.features, torch.Generator().manual_seed(seed)
    chances = torch.rand(shape.batch, 1, shape.seqlen_q, shape.seqlen_k, generator=generator).to(DEVICE)
    seen = (chances > 0.2) & (torch.arange(shape.seqlen_k, device=DEVICE) > 0)
    bias = torch.randn(1, shape.num_heads, shape.seqlen_q, shape.seqlen_k, generator=generator).to(DEVICE)
    slopes = torch.rand(shape.batch, shape.num_heads, generator=generator).to(DEVICE) / 4
    dropout: dict[str, Any] = {"dropout_p": 0.3, "seed": 0xDEADBEEF_87654321, "offset": 5} if features.dropout else {}
    masks = {"boolean": seen, "additive": bias.masked_fill(~seen, float("-inf"))}
    return Extras(
        mask=masks.get(str(features.mask)),
        alibi_slopes=slopes if features.alibi else None,
        softcap=1.5 if features.softcap else 0.0,
        **dropout,
    )


def tensors(shape: AttentionShape, layout: str = "bhsd", tokens: tuple[int, int] | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch, (rows_q, rows_k) = (1, tokens) if tokens else (shape.batch, (shape.seqlen_q, shape.seqlen_k))
    drawn = []
    for heads, rows, dim in (
        (shape.num_heads, rows_q, shape.head_dim),
        (shape.num_heads_kv, rows_k, shape.head_dim),
        (shape.num_heads_kv, rows_k, shape.head_dim_v),
    ):
        sizes = (batch, heads, rows, dim) if layout == "bhsd" else (batch, rows, heads, dim)
        tensor = torch.randn(sizes, generator=generator).to(getattr(torch, shape.dtype)).to(DEVICE)
        drawn.append(tensor if layout == "bhsd" else tensor.transpose(1, 2))
    return drawn


def cached(
    shape: AttentionShape, lengths_q: Sequence[int] | None, lengths_k: Sequence[int], *, heads_first: bool = False
) -> tuple[Any, Extras]:
    """Queries, packed where they have lengths, a cache filled to these lengths, in shuffled pages where the shape has
    pages, and extras. Behind the keys and in other pages there is NaN, and in unused places of the table any number."""
    generator, size, dtype = torch.Generator().manual_seed(2), shape.features.page_size, getattr(torch, shape.dtype)
    extras = replace(extras_of(shape), cache_seqlens=torch.tensor(lengths_k, dtype=torch.int32, device=DEVICE))
    tokens = (1, sum(lengths_q)) if lengths_q is not None else (shape.batch, shape.seqlen_q)
    q = torch.randn(tokens[0], tokens[1], shape.num_heads, shape.head_dim, generator=generator).to(dtype).to(DEVICE)
    if lengths_q is not None:
        bounds = torch.tensor([0, *accumulate(lengths_q)], dtype=torch.int32, device=DEVICE)
        extras = replace(extras, cu_seqlens_q=bounds)
    rows = size or shape.seqlen_k
    places = -(-shape.seqlen_k // rows)
    count = shape.batch * places + 3 * (size > 0)
    table = torch.randperm(count, generator=generator)[: shape.batch * places].view(shape.batch, places)
    if not size:
        table = torch.arange(count)[:, None]
    sizes = (count, shape.num_heads_kv, rows) if heads_first else (count, rows, shape.num_heads_kv)
    held = torch.zeros(count, rows, dtype=torch.bool)
    for entry, length in enumerate(lengths_k):
        held[table[entry]] = torch.arange(places * rows).view(places, rows) < length
        table[entry, -(-length // rows) :] = 1 << 30  # pages without a key may have any number
    caches = []
    for dim in (shape.head_dim, shape.head_dim_v):
        drawn = torch.randn(*sizes, dim, generator=generator)
        drawn = drawn if heads_first else drawn.transpose(1, 2)
        caches.append(drawn.masked_fill_(~held[:, None, :, None], float("nan")).to(dtype).to(DEVICE))
    if size:
        extras = replace(extras, block_table=table.int().to(DEVICE))
    return (q.transpose(1, 2), *caches), extras


def packed(shape: AttentionShape, lengths_q: Sequence[int], lengths_k: Sequence[int]) -> tuple[Any, Extras]:
    """Packed tensors and extras of sequences with these lengths."""
    bounds_q, bounds_k = ([0, *accumulate(lengths)] for lengths in (lengths_q, lengths_k))
    cu_q, cu_k = (torch.tensor(bounds, dtype=torch.int32, device=DEVICE) for bounds in (bounds_q, bounds_k))
    extras = replace(extras_of(shape), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    return tensors(shape, "bshd", (bounds_q[-1], bounds_k[-1])), extras

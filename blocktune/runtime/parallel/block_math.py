"""Attention over one block of queries and keys by PyTorch, and its gradients with a log-sum-exp over all keys.

Scores of a few queries are in memory at a time, in float32, or float64 of such tensors. Query, key and value are
[batch, heads, length, dim]; a window is around the diagonal that ends at the last query and the last key.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from blocktune.kernels.values.features import UNLIMITED
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.parallel.plan.blocks import AttentionBlock

MOST_SCORES = 1 << 26
"""That are in memory at a time."""


def forward_of(
    query: Tensor, key: Tensor, value: Tensor, block: AttentionBlock, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp over the keys of the block, in float32 or float64."""
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=wide, device=query.device)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=wide, device=query.device)
    for queries, keys, hidden in _tiles(query, block):
        scores, _ = _scores(query[:, :, queries], key[:, :, keys], hidden, scale, softcap)
        sums = torch.logsumexp(scores, -1)
        shares = torch.exp(scores - sums.masked_fill(sums.isneginf(), 0.0)[..., None])
        out[:, :, queries] = (shares @ value[:, :, keys].to(wide)[:, :, None]).flatten(1, 2)
        lse[:, :, queries] = sums.flatten(1, 2)
    return out, lse


def backward_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    delta: Tensor,
    grad: Tensor,
    block: AttentionBlock,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the pairs of the block add to the gradients of query, key and value.

    Args:
        query: of the block; key and value too.
        key: see query.
        value: see query.
        lse: over all keys, [batch, num_heads, seqlen_q].
        delta: rowsum(out * grad) - grad_lse, likewise.
        grad: of the output over all keys.
        block: which pairs take part.
        scale: of the products.
        softcap: 0 for none.
    """
    wide, heads_kv = torch.promote_types(query.dtype, torch.float32), key.shape[1]
    dq, dk, dv = (torch.zeros(tensor.shape, dtype=wide, device=query.device) for tensor in (query, key, value))
    for queries, keys, hidden in _tiles(query, block):
        part = query[:, :, queries]
        scores, slope = _scores(part, key[:, :, keys], hidden, scale, softcap)
        rows = (rows_of[:, :, queries].unflatten(1, (heads_kv, -1))[..., None] for rows_of in (lse, delta))
        sums, shift = rows
        shares = torch.exp(scores - sums.masked_fill(sums.isneginf(), 0.0))
        of_out = grad[:, :, queries].to(wide).unflatten(1, (heads_kv, -1))
        of_scores = shares * (of_out @ value[:, :, keys].to(wide)[:, :, None].mT - shift) * (scale * slope)
        dq[:, :, queries] = (of_scores @ key[:, :, keys].to(wide)[:, :, None]).flatten(1, 2)
        dk[:, :, keys] += (of_scores.mT @ part.to(wide).unflatten(1, (heads_kv, -1))).sum(2)
        dv[:, :, keys] += (shares.mT @ of_out).sum(2)
    return dq, dk, dv


def _scores(query: Tensor, key: Tensor, hidden: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor | float]:
    """Return the scores [batch, num_heads_kv, group, seqlen_q, seqlen_k] with -inf in hidden pairs, and their
    derivative by the scaled products."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide).unflatten(1, (key.shape[1], -1)) @ key.to(wide)[:, :, None].mT * scale
    slope: Tensor | float = 1.0
    if softcap:
        bent = (scores / softcap).tanh()
        scores, slope = softcap * bent, (1.0 - bent.square()).masked_fill(hidden, 0.0)  # of a NaN, too
    return scores.masked_fill(hidden, -torch.inf), slope


def _tiles(query: Tensor, block: AttentionBlock) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield some queries, the keys of their sequence, and which pairs are hidden [queries, keys]."""
    for first_q, first_k, (seqlen_q, seqlen_k) in _sequences(block):
        most = max(MOST_SCORES // max(query.shape[0] * query.shape[1] * seqlen_k, 1), 1)
        for first in range(0, seqlen_q, most):
            count = min(most, seqlen_q - first)
            rows = torch.arange(first, first + count, device=query.device) + seqlen_k - seqlen_q
            hidden = _hidden_pairs(rows, seqlen_k, block)
            yield slice(first_q + first, first_q + first + count), slice(first_k, first_k + seqlen_k), hidden


def _sequences(block: AttentionBlock) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Yield the first query, the first key and both lengths of each sequence."""
    if not block.bounds_q:
        yield 0, 0, block.sizes[0]
        return
    for (first_q, last_q), (first_k, last_k) in zip(pairwise(block.bounds_q), pairwise(block.bounds_k), strict=True):
        yield first_q, first_k, (last_q - first_q, last_k - first_k)


def _hidden_pairs(rows: Tensor, seqlen_k: int, block: AttentionBlock) -> Tensor:
    """Return [queries, keys], True where the window hides the key from a query on this row of the diagonal."""
    distance = torch.arange(seqlen_k, device=rows.device) - rows[:, None]
    left, right = block.window
    right = 0 if block.causal is Causal.LOWER_RIGHT else right
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left != UNLIMITED:
        hidden |= distance < -left
    if right != UNLIMITED:
        hidden |= distance > right
    return hidden

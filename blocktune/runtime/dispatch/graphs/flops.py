"""Counts of our ops for `torch.utils.flop_counter`: as for PyTorch's attention, pairs that a mask hides count, too.

Of packed sequences and caches the lengths count where they can be read, else the longest ones.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from blocktune.runtime.dispatch.graphs.graph_call import graph_call
from blocktune.runtime.dispatch.obstacles import is_symbolic

Lengths = Sequence[int] | None


def forward_flops(
    query: Tensor, key: Tensor, value: Tensor, tensors: Any, lengths: Lengths, text: str, **_: Any
) -> int:
    """Return the FLOPs of scores and output."""
    flops: int = 2 * query.shape[1] * (query.shape[3] + value.shape[3])
    return flops * _pairs(query, key, tensors, lengths, text)


def backward_flops(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None,
    tensors: Any, lengths: Lengths, text: str, **_: Any,
) -> int:  # fmt: skip
    """Return the FLOPs of scores, their gradient, and the gradients of query, key and value."""
    del out, lse, grad, grad_lse
    flops: int = 2 * query.shape[1] * (3 * query.shape[3] + 2 * value.shape[3])
    return flops * _pairs(query, key, tensors, lengths, text)


def bias_flops(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None,
    tensors: Any, lengths: Lengths, text: str, **_: Any,
) -> int:  # fmt: skip
    """Return the FLOPs of scores and their gradient."""
    del out, lse, grad, grad_lse
    return forward_flops(query, key, value, tensors, lengths, text)


def plain_flops(query: Tensor, key: Tensor, value: Tensor, *options: Any, **_: Any) -> int:
    """Return the FLOPs of a call without features."""
    del options
    batch, heads, seqlen_q, head_dim = query.shape
    flops: int = 2 * batch * heads * seqlen_q * key.shape[2] * (head_dim + value.shape[3])
    return flops


def _pairs(query: Tensor, key: Tensor, tensors: Sequence[Tensor], lengths: Lengths, text: str) -> int:
    """Return the (query, key) pairs of a head, of all batch entries together."""
    named = dict(zip(graph_call(text).tensors, tensors, strict=True))
    batch, seqlen_q, seqlen_k = lengths or (query.shape[0], query.shape[2], key.shape[2])
    queries, keys = [seqlen_q] * batch, [seqlen_k] * batch
    if lengths is not None and not is_symbolic(query):
        if "cu_seqlens_q" in named:
            queries = named["cu_seqlens_q"].diff().tolist()
        if "cu_seqlens_k" in named:
            keys = named["cu_seqlens_k"].diff().tolist()
        if "cache_seqlens" in named:
            keys = named["cache_seqlens"].tolist()
    return sum(rows * columns for rows, columns in zip(queries, keys, strict=True))

"""Packed queries over keys that lie in pages: chunks of prompts, and decoding, over a paged cache.

Few queries of each sequence are padded at their beginning, which leaves the last one at the last key, and decoded. More
of them are computed as they are, by forward kernels. Both read the pages where they lie. For gradients, for dropout and
for PyTorch, the keys are copied in their order.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.compiler import is_compiling

from blocktune.kernels.base.feature_arguments import DECODED_QUERIES
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.api.cache.rows import CacheRows
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.call_checks import check_dimensions, check_sizes
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.obstacles import is_symbolic, needs_gradients, tensor_obstacle, trace_obstacle

FEW_QUERIES = DECODED_QUERIES
"""Up to here the padding costs decoding next to nothing."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The sequence number of every packed token and its place in the sequence, int64 [tokens]; of those after the last
    sequence the place goes on."""

    sequence: Tensor
    place: Tensor

    @classmethod
    def of(cls, bounds: Tensor, count: int) -> Self:
        """Return the first `count` tokens of sequences that begin at `bounds`, int32 [sequences + 1]."""
        token = torch.arange(count, device=bounds.device)
        found = torch.searchsorted(bounds.long(), token, right=True) - 1
        sequence = found.clamp(max=bounds.shape[0] - 2)
        return cls(sequence, token - bounds.long()[sequence])


def check_pages(query: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, dispatcher: Dispatcher) -> None:
    """Check the pages of packed queries [1, num_heads, tokens, head_dim], over sequences of so many keys.

    Raises:
        UsageError: the tensors do not fit each other, the table is not int32 [sequences, max_pages], names a page that
            is not there or too few for the keys.
    """
    check_dimensions("[pages, page_size, heads, dim]", k=k, v=v)
    check_sizes(query, *(pages.transpose(1, 2)[:1] for pages in (k, v)), names="q, k and v")
    rows = CacheRows.of(lengths, None, None, table)
    if not is_compiling():
        k_pages, v_pages, pages = rows.as_pages(k, v)
        sizes, page_size = (lengths.shape[0], 1, rows.capacity(k)), k_pages.shape[1]
        tensors = {"block_table": pages, "cache_seqlens": lengths}
        call = Call.of(causal=Causal.NONE, scale=1.0, page_size=page_size, lengths=sizes, **tensors)
        dispatcher.check(query, k_pages, v_pages, call)


def lengths_of(bounds: Tensor) -> Tensor:
    """Return the lengths of sequences with these bounds, int32 [sequences]."""
    return (bounds[1:] - bounds[:-1]).contiguous()


def as_sequences(k: Tensor, v: Tensor, table: Tensor, bounds: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of pages as packed sequences [tokens, heads, dim] with these bounds. There are as many
    tokens as sequences of the longest length have, since no one waits for the GPU to count them."""
    size, pages = k.shape[1], table.shape[1]
    tokens = Tokens.of(bounds, table.shape[0] * min(longest, pages * size))
    page = table.long()[tokens.sequence, (tokens.place // size).clamp(max=pages - 1)]
    is_key = tokens.place < lengths_of(bounds)[tokens.sequence]  # after them the table may hold anything
    row = tokens.place % size
    page = page.where(is_key, 0)
    return k[page, row], v[page, row]


def reads_pages(query: Tensor, k: Tensor, v: Tensor, longest: int, asked: dict[str, Any]) -> bool:
    """Return whether kernels may read the pages: over a cache there are neither gradients nor dropout. A
    compiled graph keeps the answer, which is no there for tensors that only PyTorch computes."""
    if longest <= 0 or query.numel() == 0 or asked.get("dropout_p"):
        return False
    if needs_gradients(query, k, v, asked.get("sinks"), asked.get("alibi_slopes")):
        return False
    return not is_symbolic(query) or tensor_obstacle(query, k, v) is None


def over_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    longest: int,
    asked: dict[str, Any],
    *,
    lse: bool,
    dispatcher: Dispatcher,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of packed queries [tokens, num_heads, head_dim], at most `longest` of a sequence, over pages.

    Args:
        lengths: int32 [sequences], how many keys each has.
        asked: the arguments of `Call.of`, with the bounds of the queries.

    Returns:
        the output [tokens, num_heads, head_dim_v] and the log-sum-exp [num_heads, tokens], None unless it is wanted.

    Raises:
        NotServedError: no kernel serves the call. PyTorch would compute scores of all rows that the table has room for,
            and does so only in traced calls, whose lengths cannot be read.
    """
    k_pages, v_pages, pages = CacheRows(table=table).as_pages(k, v)
    assert pages is not None  # since there was a table
    keys, values = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    of_cache = {
        "cache_seqlens": lengths,
        "block_table": pages,
        "page_size": k_pages.shape[1],
        "lengths": (table.shape[0], longest, pages.shape[1] * k_pages.shape[1]),
        "only_ours": asked.get("only_ours", False) or trace_obstacle(q, k, v) is None,
    }
    others = {name: own for name, own in asked.items() if name != "cu_seqlens_k"} | of_cache
    if longest <= FEW_QUERIES and not asked.get("num_splits"):
        return _decoded(q, keys, values, longest, others, lse=lse, dispatcher=dispatcher)
    out, sums = dispatcher.attend(q.transpose(0, 1)[None], keys, values, lse=lse, **others)
    return out[0].transpose(0, 1), sums


def _decoded(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    longest: int,
    asked: dict[str, Any],
    *,
    lse: bool,
    dispatcher: Dispatcher,
) -> tuple[Tensor, Tensor | None]:
    """Return `over_pages` of queries that are padded to the longest sequence."""
    others = {name: own for name, own in asked.items() if name not in ("cu_seqlens_q", "dropout_p")}
    bounds = asked["cu_seqlens_q"].long()
    slots = torch.arange(longest, device=q.device) - longest
    padded = q[(bounds[1:, None] + slots).clamp(min=0)]
    out, sums = dispatcher.attend(padded.transpose(1, 2), keys, values, lse=lse, **others)
    tokens = Tokens.of(bounds, q.shape[0])
    slot = tokens.place - (bounds[1:] - bounds[:-1])[tokens.sequence] + longest
    inside = slot < longest
    row = tokens.sequence, slot.clamp(max=longest - 1)
    packed = out.transpose(1, 2)[row].masked_fill(~inside[:, None, None], 0.0)
    if not lse or sums is None:
        return packed, None
    return packed, sums.transpose(1, 2)[row].masked_fill(~inside[:, None], float("-inf")).T

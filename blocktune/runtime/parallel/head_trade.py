"""Heads for tokens: each rank of a group gets some of the heads of all its tokens, and gives results back likewise
(DeepSpeed-Ulysses, arXiv 2309.14509)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blocktune.runtime.parallel.messages import Messages, ProcessGroup
from blocktune.runtime.parallel.plan.layout import Range, SequenceLayout, coalesce, rows_of
from blocktune.runtime.parallel.ring import heads_first


@dataclass(frozen=True, slots=True)
class HeadTrade:
    """The trade of heads among a group's ranks.

    group: who trades. rank: this one. tokens: of each rank, the rows of its tensor and where they stand among the
    tokens of all. heads: which ones each rank gets; of keys two ranks may get the same.
    """

    group: ProcessGroup
    rank: int
    tokens: tuple[tuple[tuple[Range, Range], ...], ...]
    heads: tuple[Range, ...]

    def gather_tokens(self, tensor: Tensor) -> Tensor:
        """Return all tokens of this rank's heads, [batch, heads, length, dim], from this rank's tokens of all heads."""
        total = max((place[1] for own in self.tokens for _, place in own), default=0)
        first, last = self.heads[self.rank]
        rows = tensor.new_empty(total, tensor.shape[0], last - first, tensor.shape[3])
        sent, received = [], []
        for rank, (heads, their) in enumerate(zip(self.heads, self.tokens, strict=True)):
            for own, place in self.tokens[self.rank]:
                part = tensor[:, slice(*heads), slice(*own)].permute(2, 0, 1, 3)
                if rank == self.rank:
                    rows[slice(*place)] = part
                else:
                    sent.append((rank, part.contiguous()))
            received += [(rank, rows[slice(*place)]) for _, place in their if rank != self.rank]
        Messages(self.group, sent, received, "heads for tokens").wait()
        return heads_first(rows)

    def gather_heads(self, tensor: Tensor) -> Tensor:
        """Return this rank's tokens of all heads from all tokens of its own heads; heads that several ranks have are
        added up."""
        rows, mine = tensor.permute(2, 0, 1, 3), self.tokens[self.rank]
        num_heads, length = max(last for _, last in self.heads), sum(own[1] - own[0] for own, _ in mine)
        adds_up = sum(last - first for first, last in self.heads) > num_heads
        dtype = torch.promote_types(tensor.dtype, torch.float32) if adds_up else tensor.dtype
        found = tensor.new_zeros(tensor.shape[0], num_heads, length, tensor.shape[3], dtype=dtype)
        sent, parts = [], []
        for rank, ((first, last), their) in enumerate(zip(self.heads, self.tokens, strict=True)):
            for own, place in mine:
                if rank == self.rank:
                    parts.append((rank, own, rows[slice(*place)]))
                else:
                    sizes = own[1] - own[0], tensor.shape[0], last - first, tensor.shape[3]
                    parts.append((rank, own, tensor.new_empty(sizes)))
            sent += [(rank, rows[slice(*place)].contiguous()) for _, place in their if rank != self.rank]
        received = [(rank, part) for rank, _, part in parts if rank != self.rank]
        Messages(self.group, sent, received, "tokens for heads").wait()
        for rank, own, part in parts:  # in the order of the ranks: sums are the same in every run
            found[:, slice(*self.heads[rank]), slice(*own)] += heads_first(part)
        return found.to(tensor.dtype)


class TokensGathered(torch.autograd.Function):  # type: ignore[misc]
    """`HeadTrade.gather_tokens` of several tensors, which the gradients undo in the same order on all ranks."""

    @staticmethod
    def forward(ctx: Any, trades: tuple[HeadTrade, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.trades = trades
        return tuple(trade.gather_tokens(tensor) for trade, tensor in zip(trades, tensors, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *(trade.gather_heads(grad) for trade, grad in zip(ctx.trades, grads, strict=True))


class HeadsGathered(torch.autograd.Function):  # type: ignore[misc]
    """`HeadTrade.gather_heads` of several tensors, which the gradients undo in the same order on all ranks."""

    @staticmethod
    def forward(ctx: Any, trade: HeadTrade, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.trade = trade
        return tuple(trade.gather_heads(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *(ctx.trade.gather_tokens(grad) for grad in grads)


def tokens_of(layout: SequenceLayout, ranks: range) -> tuple[tuple[tuple[Range, Range], ...], ...]:
    """Return for each of some ranks its rows, and where they stand among the tokens of all of these."""
    together = coalesce(part for rank in ranks for part in layout.ranges[rank])
    starts = list(zip(together, rows_of(together), strict=True))
    return tuple(
        tuple(
            (rows, _place(part, starts))
            for part, rows in zip(layout.ranges[rank], rows_of(layout.ranges[rank]), strict=True)
        )
        for rank in ranks
    )


def _place(part: Range, starts: list[tuple[Range, Range]]) -> Range:
    """Return the rows of a range among those of larger ones."""
    shift = next(rows[0] - own[0] for own, rows in starts if own[0] <= part[0] < own[1])
    return part[0] + shift, part[1] + shift


def heads_of(num_heads: int, num_heads_kv: int, size: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """Return which query heads and which key heads each of `size` ranks gets; `size` divides num_heads, and it divides
    num_heads_kv or is a multiple of it."""
    each, group = num_heads // size, num_heads // num_heads_kv
    of_queries = tuple((rank * each, (rank + 1) * each) for rank in range(size))
    return of_queries, tuple((first // group, (last - 1) // group + 1) for first, last in of_queries)

"""Attention whose keys are spread over the ranks of a group: they travel to the queries while kernels run.

The backward lets them travel again. Each rank recomputes probabilities with its own finished log-sum-exp, keeps the
gradients of its queries, and sends those of the keys that it got back to where they came from. All sums over blocks are
float32 (float64 of such tensors) and in an order that depends on the layout alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.portable.sinks.results import gradient_of_sinks
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.parallel.block_attention import FinishedRows, ScoreOptions, attend_block, gradients_of_block
from blocktune.runtime.parallel.messages import Message, Messages, ProcessGroup
from blocktune.runtime.parallel.plan.blocks import AttentionBlock
from blocktune.runtime.parallel.plan.layout import Range
from blocktune.runtime.parallel.plan.steps import RankStep, Transfer
from blocktune.runtime.parallel.row_sums import AttentionSums, GradientSums

HEAD_START_CYCLES = 30_000
"""Of a GPU's clock: about 17 us, which messages need to begin on another stream."""
LONG_WALK = 32_768
"""Queries of a block up to which a backward kernel walks along all of them at once."""
SHORT_WALK = 8_192
"""Queries of a part of a longer block. The rows of one stay in the L2 until all programs have read them: on an H200
parts of 131,072 queries over as many keys run 1.10 times as fast as the whole."""


@dataclass(frozen=True, slots=True)
class RankRing:
    """One rank's attention to the keys of all ranks in a group.

    group: None for a rank that needs no other. steps: the rank's own.
    """

    group: ProcessGroup
    steps: tuple[RankStep, ...]
    numbers: ScoreOptions
    dispatcher: Dispatcher

    def arriving(self, *own: Tensor, outbox: "Outbox | None" = None) -> Iterator[tuple[RankStep, list[Tensor]]]:
        """Yield each step with the rows of keys and values that its blocks read, [rows, batch, heads, dim]; those of
        the next step travel meanwhile, and what is in the outbox with them. At the end all of it has arrived."""
        outbox = Outbox([], []) if outbox is None else outbox
        rows, messages = list(own), Messages(self.group, [], [], "")
        for number, step in enumerate(self.steps):
            messages.wait()
            arrived, sent, received = rows, [], []
            for following in self.steps[number + 1 : number + 2]:
                rows = [tensor.new_empty(following.num_rows, *tensor.shape[1:]) for tensor in own]
                sent, received = _messages(following.sent, own), _messages(following.received, rows)
            messages = outbox.sent_with(self.group, sent, received)
            _give_head_start(messages, own[0])
            yield step, arrived
        messages.wait()
        outbox.sent_with(self.group, [], []).wait()

    @property
    def queries(self) -> list[Range]:
        """The queries of each block, in order."""
        return [block.queries for step in self.steps for block in step.blocks]

    @property
    def own_keys(self) -> list[Range]:
        """The rank's own keys to which gradients are added: by its own blocks, then by the ranks that read them."""
        first, *others = self.steps
        returned = [transfer.rows for step in others for transfer in step.sent]
        return [*(block.keys for block in first.blocks), *returned]

    def in_short_walks(self) -> "RankRing":
        """Return a ring whose long blocks are parts of them, for the backward."""
        return replace(self, steps=tuple(replace(step, blocks=_short_walks(step.blocks)) for step in self.steps))

    def returning(self, step: RankStep, found: list[Tensor], outbox: "Outbox") -> "Returned":
        """Put gradients of keys and values into the outbox, with memory for those of the rank's own."""
        parts = [[_empty_rows(transfer, tensor) for transfer in step.sent] for tensor in found]
        outbox.sent.extend(_messages(step.received, found))
        outbox.received.extend(
            (transfer.rank, part) for own in parts for transfer, part in zip(step.sent, own, strict=True)
        )
        return Returned(step.sent, parts)


@dataclass(frozen=True, slots=True)
class Outbox:
    """Gradients of keys and values that leave with the next keys. Messages on their own would begin one after the
    other, and the later ones find no multiprocessor: a kernel has taken all of them by then."""

    sent: list[Message]
    received: list[Message]

    def sent_with(self, group: ProcessGroup, sent: list[Message], received: list[Message]) -> Messages:
        """Send all of it after keys and values, and keep nothing."""
        content = "gradients of keys and values" if self.sent or self.received else "keys and values"
        messages = Messages(group, [*sent, *self.sent], [*received, *self.received], content)
        self.sent.clear()
        self.received.clear()
        return messages


@dataclass(frozen=True, slots=True)
class Returned:
    """Gradients of a rank's keys and values that come back from ranks that read them."""

    transfers: tuple[Transfer, ...]
    parts: list[list[Tensor]]

    def add_to(self, sums: list[GradientSums]) -> None:
        """Add them to the sums, once they have arrived."""
        for total, own in zip(sums, self.parts, strict=True):
            for transfer, part in zip(self.transfers, own, strict=True):
                total.add(transfer.rows, heads_first(part))


class RingAttention(torch.autograd.Function):  # type: ignore[misc]
    """Output and log-sum-exp of a rank's queries over all keys, both differentiable once."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ring: RankRing) -> Any:
        out, lse = _attend(query, key, value, sinks, ring)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.ring = ring
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        rows = FinishedRows(out, lse, grad, grad_lse)
        gradients: tuple[Tensor | None, ...] = _gradients(query, key, value, rows, ctx.ring)
        of_sinks = gradient_of_sinks(out, lse, grad, grad_lse, sinks) if ctx.needs_input_grad[3] else None
        return *gradients, of_sinks, None


def _give_head_start(messages: Messages, tensor: Tensor) -> None:
    """Let messages that are under way begin before the next kernel: one that takes all multiprocessors of a GPU and
    keeps them would not let them begin before it ends."""
    if messages.are_under_way and tensor.is_cuda:
        torch.cuda._sleep(HEAD_START_CYCLES)


def rows_first(tensor: Tensor) -> Tensor:
    """Return a tensor [batch, heads, length, dim] as contiguous [length, batch, heads, dim]."""
    return tensor.permute(2, 0, 1, 3).contiguous()


def heads_first(rows: Tensor) -> Tensor:
    """Return a view of [length, batch, heads, dim] as [batch, heads, length, dim]."""
    return rows.permute(1, 2, 0, 3)


def _attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ring: RankRing) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over all keys."""
    sums = AttentionSums(query, value.shape[3], ring.queries, sinks)
    for step, arrived in ring.arriving(rows_first(key), rows_first(value)):
        keys, values = map(heads_first, arrived)
        for block in step.blocks:
            queries, seen = slice(*block.queries), slice(*block.keys)
            part = query[:, :, queries], keys[:, :, seen], values[:, :, seen]
            sums.add(block.queries, *attend_block(*part, block, ring.numbers, ring.dispatcher))
    return sums.results()


def _gradients(query: Tensor, key: Tensor, value: Tensor, rows: FinishedRows, ring: RankRing) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    ring = ring.in_short_walks()
    dq = GradientSums(query, query.shape, ring.queries)
    sums = [GradientSums(tensor, tensor.shape, ring.own_keys) for tensor in (key, value)]
    outbox, returned = Outbox([], []), list[Returned]()
    for number, (step, arrived) in enumerate(ring.arriving(rows_first(key), rows_first(value), outbox=outbox)):
        if len(returned) > 1:
            returned.pop(0).add_to(sums)  # they left before the last step, and arrived with the keys of this one
        keys = [heads_first(one) for one in arrived]
        seen = [block.keys for block in step.blocks]
        found = sums if number == 0 else [GradientSums(one, one.shape, seen) for one in keys]
        _add_gradients(step, query, keys, rows, ring, [dq, *found])
        if number:
            returned.append(ring.returning(step, [rows_first(one.results()) for one in found], outbox))
    for last in returned:
        last.add_to(sums)
    return dq.results(), *(total.results() for total in sums)


def _add_gradients(
    step: RankStep, query: Tensor, arrived: list[Tensor], rows: FinishedRows, ring: RankRing, sums: list[GradientSums]
) -> None:
    """Add a step's gradients to those of the queries and of the keys and values that arrived."""
    keys, values = arrived
    for block in step.blocks:
        queries, seen = slice(*block.queries), slice(*block.keys)
        part = query[:, :, queries], keys[:, :, seen], values[:, :, seen]
        of_block = gradients_of_block(*part, rows.part(*block.queries), block, ring.numbers, ring.dispatcher)
        for total, where, one in zip(sums, (block.queries, block.keys, block.keys), of_block, strict=True):
            total.add(where, one)


def _short_walks(blocks: tuple[AttentionBlock, ...]) -> tuple[AttentionBlock, ...]:
    """Return blocks, the long ones in parts of their queries."""
    return tuple(
        part
        for block in blocks
        for part in (block.in_parts(SHORT_WALK) if block.queries[1] - block.queries[0] > LONG_WALK else (block,))
    )


def _messages(transfers: tuple[Transfer, ...], tensors: Any) -> list[Message]:
    """Return what goes to or comes from each rank: contiguous rows of each tensor."""
    return [(transfer.rank, tensor[slice(*transfer.rows)]) for tensor in tensors for transfer in transfers]


def _empty_rows(transfer: Transfer, like: Tensor) -> Tensor:
    """Return memory for the rows of a transfer."""
    return like.new_empty(transfer.rows[1] - transfer.rows[0], *like.shape[1:])

"""Attention whose keys are spread over the ranks of a group: they travel to the queries while kernels run.

The backward lets them travel again. Each rank recomputes probabilities with its own finished log-sum-exp, keeps the
gradients of its queries, and sends those of the keys that it got back to where they came from. All sums over blocks are
float32 (float64 of such tensors) and in an order that depends on the layout alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.dispatch.dispatcher import Dispatcher
from blocktune.kernels.parallel.block_attention import FinishedRows, Numbers, attend_block, gradients_of_block
from blocktune.kernels.parallel.messages import Messages, ProcessGroup
from blocktune.kernels.parallel.plan.steps import Step, Transfer
from blocktune.kernels.portable.partials.rows import add_partial
from blocktune.kernels.portable.sinks.results import gradient_of_sinks, with_sinks


@dataclass(frozen=True, slots=True)
class Ring:
    """How a rank attends to the keys of all ranks of a group.

    group: None for a rank that needs no other. steps: the rank's own.
    """

    group: ProcessGroup
    steps: tuple[Step, ...]
    numbers: Numbers
    dispatcher: Dispatcher

    def arriving(self, *own: Tensor) -> Iterator[tuple[Step, list[Tensor]]]:
        """Yield each step with the rows of keys and values that its blocks read, [rows, batch, heads, dim]; those of
        the next step travel meanwhile."""
        rows, messages = list(own), Messages(self.group, [], [], "")
        for number, step in enumerate(self.steps):
            messages.wait()
            arrived, later = rows, self.steps[number + 1 : number + 2]
            for following in later:
                rows = [tensor.new_empty(following.num_rows, *tensor.shape[1:]) for tensor in own]
                sent, received = _messages(following.sent, own), _messages(following.received, rows)
                messages = Messages(self.group, sent, received, "keys and values")
            yield step, arrived

    def returning(self, step: Step, found: list[Tensor], like: list[Tensor]) -> "Returned":
        """Send gradients of keys and values back to where they came from, and receive those of the rank's own."""
        parts = [[_empty_rows(transfer, tensor) for transfer in step.sent] for tensor in like]
        received = [(transfer.rank, part) for own in parts for transfer, part in zip(step.sent, own, strict=True)]
        messages = Messages(self.group, _messages(step.received, found), received, "gradients of keys and values")
        return Returned(messages, step.sent, parts)


@dataclass(frozen=True, slots=True)
class Returned:
    """Gradients of a rank's keys and values that come back from ranks that read them."""

    messages: Messages
    transfers: tuple[Transfer, ...]
    parts: list[list[Tensor]]

    def add_to(self, sums: list[Tensor]) -> None:
        """Wait for them and add them to the sums."""
        self.messages.wait()
        for total, own in zip(sums, self.parts, strict=True):
            for transfer, part in zip(self.transfers, own, strict=True):
                total[slice(*transfer.rows)] += part


class RingAttention(torch.autograd.Function):  # type: ignore[misc]
    """Output and log-sum-exp of a rank's queries over all keys, both differentiable once."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ring: Ring) -> Any:
        out, lse = _attended(query, key, value, ring)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        out = out.to(query.dtype)
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


def rows_first(tensor: Tensor) -> Tensor:
    """Return a tensor [batch, heads, length, dim] as contiguous [length, batch, heads, dim]."""
    return tensor.permute(2, 0, 1, 3).contiguous()


def heads_first(rows: Tensor) -> Tensor:
    """Return a view of [length, batch, heads, dim] as [batch, heads, length, dim]."""
    return rows.permute(1, 2, 0, 3)


class PartialSums:
    """Output and log-sum-exp over the keys seen so far, in float32 or float64; those of a first block that covers all
    queries as they are, since nothing may be added to them."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        self._wide = torch.promote_types(query.dtype, torch.float32)
        self._sizes, self._device = (*query.shape[:3], value.shape[3]), query.device
        self._found: tuple[Tensor, Tensor] | None = None

    def add(self, queries: tuple[int, int], part: Tensor, lse: Tensor) -> None:
        """Add attention of some queries over further keys."""
        if self._found is None and queries == (0, self._sizes[2]):
            self._found = part, lse
            return
        out, sums = self.results()
        out, sums = self._found = out.to(self._wide), sums
        add_partial(out[:, :, slice(*queries)], sums[:, :, slice(*queries)], part, lse)

    def results(self) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp."""
        if self._found is None:
            out = torch.zeros(self._sizes, dtype=self._wide, device=self._device)
            self._found = out, torch.full(self._sizes[:3], -torch.inf, dtype=self._wide, device=self._device)
        return self._found


def _attended(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over all keys."""
    sums = PartialSums(query, value)
    for step, arrived in ring.arriving(rows_first(key), rows_first(value)):
        keys, values = map(heads_first, arrived)
        for block in step.blocks:
            queries, seen = slice(*block.queries), slice(*block.keys)
            part = query[:, :, queries], keys[:, :, seen], values[:, :, seen]
            sums.add(block.queries, *attend_block(*part, block, ring.numbers, ring.dispatcher))
    return sums.results()


def _gradients(query: Tensor, key: Tensor, value: Tensor, rows: FinishedRows, ring: Ring) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    wide, own = rows.lse.dtype, [rows_first(key), rows_first(value)]
    dq, sums = torch.zeros_like(query, dtype=wide), [torch.zeros_like(tensor, dtype=wide) for tensor in own]
    under_way: Returned | None = None
    for number, (step, arrived) in enumerate(ring.arriving(*own)):
        found = sums if number == 0 else [torch.zeros_like(tensor, dtype=wide) for tensor in arrived]
        _add_gradients(step, query, arrived, rows, ring, dq, found)
        if under_way is not None:
            under_way.add_to(sums)
        under_way = ring.returning(step, found, sums) if number else None
    if under_way is not None:
        under_way.add_to(sums)
    return dq.to(query.dtype), *(heads_first(total).to(key.dtype) for total in sums)


def _add_gradients(
    step: Step, query: Tensor, arrived: list[Tensor], rows: FinishedRows, ring: Ring, dq: Tensor, found: list[Tensor]
) -> None:
    """Add what the blocks of a step find to the gradients of the queries and of the keys and values that arrived."""
    (keys, values), (dk, dv) = map(heads_first, arrived), map(heads_first, found)
    for block in step.blocks:
        queries, seen = slice(*block.queries), slice(*block.keys)
        part = query[:, :, queries], keys[:, :, seen], values[:, :, seen]
        of_block = gradients_of_block(*part, rows.part(*block.queries), block, ring.numbers, ring.dispatcher)
        for total, one in zip((dq[:, :, queries], dk[:, :, seen], dv[:, :, seen]), of_block, strict=True):
            total += one


def _messages(transfers: tuple[Transfer, ...], tensors: Any) -> list[tuple[int, Tensor]]:
    """Return what goes to or comes from each rank: contiguous rows of each tensor."""
    return [(transfer.rank, tensor[slice(*transfer.rows)]) for tensor in tensors for transfer in transfers]


def _empty_rows(transfer: Transfer, like: Tensor) -> Tensor:
    """Return memory for the rows of a transfer."""
    return like.new_empty(transfer.rows[1] - transfer.rows[0], *like.shape[1:])

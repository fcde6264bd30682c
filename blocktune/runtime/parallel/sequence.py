"""A sequence in parts, one for each rank, and whole again."""

from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.parallel.agreement import agree, digest
from blocktune.runtime.parallel.messages import Messages
from blocktune.runtime.parallel.plan.layout import ZIGZAG, SequenceLayout, find_layout, rows_of
from blocktune.runtime.parallel.ranks import Ranks


def split_sequence(tensor: Tensor, *, dim: int, group: Any = None, layout: SequenceLayout | str = ZIGZAG) -> Tensor:
    """Return this rank's tokens of a tensor that holds all of them. Nothing is sent; differentiable.

    Args:
        tensor: the whole: tokens, positions, queries, ... equal on all ranks.
        dim: which dimension counts tokens.
        group: as in `context_parallel_attention`.
        layout: `zigzag`, which gives causal ranks equal work, `contiguous`, or a SequenceLayout.

    Raises:
        UsageError: the layout is of another group or another number of tokens.
    """
    ranks = Ranks.of(group)
    placed = find_layout(layout, tensor.shape[dim], ranks.size)
    if placed.seqlen != tensor.shape[dim]:
        raise UsageError(
            f"`layout` must be of the {tensor.shape[dim]} tokens in dimension {dim}, but got one of {placed.seqlen}. "
            "Make the layout for this sequence."
        )
    parts = placed.ranges[ranks.number]
    if not parts:
        return tensor.narrow(dim, 0, 0)
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in parts], dim)


@torch.no_grad()  # type: ignore[untyped-decorator]
def join_sequence(tensor: Tensor, *, dim: int, group: Any = None, layout: SequenceLayout | str = ZIGZAG) -> Tensor:
    """Return the whole of which each rank has the tokens of its part, on all ranks. It has no gradient.

    Args:
        tensor: this rank's tokens.
        dim: which dimension counts tokens.
        group: as in `context_parallel_attention`.
        layout: as in `split_sequence`; a name is enough where all ranks hold equally many tokens.

    Raises:
        UsageError: a rank has more or fewer tokens than the layout says, or ranks call differently. All ranks raise it.
        RankError: another rank ended, or took no part within the group's timeout.
    """
    ranks, length = Ranks.of(group), tensor.shape[dim]
    rows = tensor.movedim(dim, 0).contiguous()
    try:
        placed = find_layout(layout, length * ranks.size, ranks.size)
        if placed.length(ranks.number) != length:
            raise UsageError(
                f"`tensor` must have the {placed.length(ranks.number)} tokens of part {ranks.number} of "
                f"{placed.seqlen} tokens in dimension {dim}, but got {length}. Give the layout that it was split by."
            )
    except UsageError as error:
        agree(ranks, {}, error)
        raise
    sizes = {"seqlen": placed.seqlen, "sizes": list(rows.shape[1:]), "join": digest(placed)}
    agree(ranks, sizes | {"dtype": str(rows.dtype), "device": rows.device.type}, device=rows.device)
    return _whole(_gather_rows(rows, placed, ranks), placed).movedim(0, dim)


def _gather_rows(rows: Tensor, layout: SequenceLayout, ranks: Ranks) -> dict[int, Tensor]:
    """Return the rows of every rank: those of the row of ranks travel first, then those of all rows."""
    known = {ranks.number: rows}
    ways = (
        (ranks.row, ranks.column_number, ranks.num_columns, 1),
        (
            ranks.column,
            ranks.row_number,
            ranks.num_rows,
            ranks.num_columns,
        ),
    )
    for group, own, size, stride in ways:
        others = [peer for peer in range(size) if peer != own]
        found = {
            (peer, number + (peer - own) * stride): rows.new_empty(
                layout.length(number + (peer - own) * stride), *rows.shape[1:]
            )
            for peer in others
            for number in sorted(known)
        }
        sent = [(peer, known[number]) for peer in others for number in sorted(known)]
        Messages(group, sent, [(peer, part) for (peer, _), part in found.items()], "parts of a sequence").wait()
        known |= {number: part for (_, number), part in found.items()}
    return known


def _whole(parts: dict[int, Tensor], layout: SequenceLayout) -> Tensor:
    """Return all rows in the order of the sequence."""
    pieces = [
        (start, parts[rank][slice(*rows)])
        for rank, own in enumerate(layout.ranges)
        for (start, _), rows in zip(own, rows_of(own), strict=True)
    ]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda piece: piece[0])] or [parts[0]])

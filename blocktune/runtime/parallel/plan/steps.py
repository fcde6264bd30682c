"""The steps of each rank: the keys that it computes with, and when they travel.

Keys go straight from the rank that holds them to the rank that needs them, and only those that it sees. In step s of a
ring rank r gets the keys of rank r - s; a gather gets those of all ranks in one step, in the order of the sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from blocktune.runtime.parallel.plan.blocks import AttentionBlock, Sight, blocks_of, own_blocks, visible_range
from blocktune.runtime.parallel.plan.layout import Range, SequenceLayout, coalesce, rows_of


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows of keys that go to a rank or come from it."""

    rank: int
    rows: Range


@dataclass(frozen=True, slots=True)
class RankStep:
    """Keys that arrive in rows of a buffer, keys that leave, and what is computed with those that arrived.

    The first step of a rank has no transfers: its keys are the rank's own.
    """

    num_rows: int
    received: tuple[Transfer, ...]
    sent: tuple[Transfer, ...]
    blocks: tuple[AttentionBlock, ...]


@lru_cache(maxsize=256)
def steps_of(layout: SequenceLayout, sight: Sight, rank: int, *, gathers: bool) -> tuple[RankStep, ...]:
    """Return the steps of a rank.

    Args:
        layout: which tokens each rank holds.
        sight: which keys a query sees.
        rank: whose steps.
        gathers: whether all keys travel in one step; otherwise those of one rank do.
    """
    own, others = layout.ranges[rank], range(1, layout.num_ranks)
    first = RankStep(layout.length(rank), (), (), own_blocks(own, sight))
    distances = [tuple(others)] if gathers else [(distance,) for distance in others]
    return first, *(_step(layout, sight, rank, each) for each in distances if each)


def _step(layout: SequenceLayout, sight: Sight, rank: int, distances: Sequence[int]) -> RankStep:
    """Return the step in which the keys of the ranks at these distances before a rank arrive."""
    own, size = layout.ranges[rank], layout.num_ranks
    arriving = sorted(
        (keys, source)
        for source in ((rank - distance) % size for distance in distances)
        for part in layout.ranges[source]
        if (keys := visible_range(own, part, sight)) is not None
    )
    ranges = [keys for keys, _ in arriving]
    rows = rows_of(ranges)
    received = tuple(Transfer(source, place) for place, (_, source) in zip(rows, arriving, strict=True))
    sent = tuple(
        transfer
        for distance in distances
        for transfer in _rows_to_send(own, layout.ranges[(rank + distance) % size], sight, (rank + distance) % size)
    )
    return RankStep(rows[-1][1] if rows else 0, received, sent, blocks_of(own, coalesce(ranges), sight))


def _rows_to_send(own: Sequence[Range], queries: Sequence[Range], sight: Sight, target: int) -> list[Transfer]:
    """Return the rows of a rank's keys that the queries of another rank see."""
    found = []
    for part, rows in zip(own, rows_of(own), strict=True):
        keys = visible_range(queries, part, sight)
        if keys is not None:
            shift = rows[0] - part[0]
            found.append(Transfer(target, (keys[0] + shift, keys[1] + shift)))
    return found

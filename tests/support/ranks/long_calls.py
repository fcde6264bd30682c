"""Calls of ranks that take seconds: every run is a turn, and its row is kept at once."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.support.ranks.measures import Bench, Ways, rated, tensors, timed_row, timed_turn
from tests.support.ranks.problems import flop


def measure_long(bench: Bench, ways: Ways, ranks: int, length: int) -> None:
    """Measure several ways to make the same calls, by turns. A row has the median of the runs so far, and all of
    them."""
    group, takes_part = bench.groups[ranks][0], dist.get_rank() < ranks
    leaves, turns = tensors(length // ranks, bench.device), dict[tuple[str, str], list[float]]()
    if takes_part:
        run_first(bench, ways, leaves, group)
    for name, direction in _turns(list(ways), with_backward=ranks == dist.get_world_size()):
        row = {"kind": "together", "ranks": ranks, "length": length, "direction": direction, "name": name}
        times = turns.setdefault((name, direction), [])
        if not bench.has(1.3 * flop(length, direction) / ranks / bench.alone[direction] + 1):
            if not times:
                bench.tell(**row, left_out="no time left")
            continue
        cells: dict[str, Any] = {}
        if takes_part:
            cells = timed_row(bench, lambda n=name, d=direction: timed_turn(ways[n], leaves, d, bench.device, group))
        if "ms" in cells:
            times.append(cells["ms"])
            cells |= {"ms": round(median(times), 4), "turns_ms": list(times)}
        bench.tell(**row, **rated(bench, cells, flop(length, direction) / ranks, direction))


def run_first(bench: Bench, ways: Ways, leaves: list[Tensor], group: Any) -> None:
    """Run each of our ways once: it finds configs and tries each on the tensors, which launches it more than once."""
    for name, way in ways.items():
        if not bench.is_rival(name):
            timed_turn(way, leaves, "both", bench.device, group)


def _turns(names: Sequence[str], *, with_backward: bool) -> Iterator[tuple[str, str]]:
    """Yield who is measured in which direction: what comes later finds a warmer GPU, so that the second round of
    forward and backward goes the other way around."""
    if with_backward:
        yield from ((name, "both") for name in names)
    yield from ((name, "forward") for name in names)
    if with_backward:
        yield from ((name, "both") for name in reversed(names))

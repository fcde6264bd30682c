"""How ranks are timed together: what is left of the time, what was measured, and one measurement."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.support.ranks.document import note, read
from tests.support.ranks.problems import DIM, HEADS, HEADS_KV, flop
from tests.support.ranks.rivals import FAILURES

Way = tuple[Callable[..., Any], Callable[[], Any]]
"""What attends, and what makes the context in which it is called."""

Ways = Mapping[str, Way]

TURN_S = 0.15
"""Of the slowest way, as far as ten runs make it."""


@dataclass
class Bench:
    """The time that is left, what was measured, and who measures.

    groups: the first so many ranks, as a process group and as a mesh of one dimension. own: the group of this rank
    alone. table: all ranks as a mesh of two dimensions, None where they make none.
    """

    deadline: float
    device: torch.device
    length_alone: int
    out: Path | None
    groups: dict[int, tuple[Any, DeviceMesh]]
    own: Any
    table: DeviceMesh | None

    def __post_init__(self) -> None:
        self.document = read(self.out, self.device) if self.out is not None and dist.get_rank() == 0 else {"rows": []}
        self.alone: dict[str, float] = {}
        self.rival: dict[str, tuple[str, bool]] = {}

    def tell(self, **row: Any) -> None:
        """Print a measurement on rank 0, and keep it."""
        if dist.get_rank() == 0:
            note(self.document, self.out, row)
            print(json.dumps(row), flush=True)

    def is_rival(self, way: str) -> bool:
        """Tell whether a way is PyTorch's."""
        return any(way == name for name, _ in self.rival.values())

    def has(self, seconds: float) -> bool:
        """Tell whether this much time is left on all ranks."""
        return agreed(self.deadline - time.monotonic(), dist.ReduceOp.MIN) > seconds


def agreed(value: float, way: Any, group: Any = None) -> float:
    """Return the least or greatest value of the ranks, by way of their hosts."""
    shared = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(shared, way, group=group)
    return float(shared)


def tensors(length: int, device: torch.device) -> list[Tensor]:
    """Return queries, keys and values of a rank, [1, heads, length, dim], in the memory order of projections."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [
        torch.randn(1, length, heads, DIM, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (HEADS, HEADS_KV, HEADS_KV)
    ]


def step(attend: Callable[..., Any], leaves: list[Tensor], direction: str) -> None:
    """Run a forward, or a forward and its backward."""
    with torch.no_grad() if direction == "forward" else nullcontext():
        out = attend(*leaves)
        if direction == "both":
            torch.autograd.grad(out, leaves, torch.ones_like(out))


def settle(device: torch.device) -> None:
    """Wait for what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], Any], device: torch.device, group: Any, repeats: int = 1) -> float:
    """Return the mean time of so many runs that follow each other, on the slowest rank of a group."""
    settle(device)
    agreed(0.0, dist.ReduceOp.MAX, group)
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    settle(device)
    return agreed((time.perf_counter() - begin) / repeats, dist.ReduceOp.MAX, group)


def seconds(run: Callable[[], Any], device: torch.device, group: Any, repeats: int = 0) -> float:
    """Return the time of one run after a first one, on the slowest rank of a group. repeats: how many runs follow each
    other; half a second's, ten at most, if not given."""
    timed(run, device, group)  # finds and tries configs
    once = timed(run, device, group)
    return once if once > 1.0 else timed(run, device, group, repeats or max(2, min(10, int(0.5 / once))))


def measure_in_turns(bench: Bench, ways: Ways, ranks: int, length: int, direction: str, **more: Any) -> None:
    """Measure several ways to make the same call, by turns: what comes later finds a warmer GPU."""
    window, group = more.get("window"), bench.groups[ranks][0]
    work = flop(length, direction, window)
    expected_s = work / ranks / bench.alone[direction]
    row = {"kind": "window" if window else "together", "ranks": ranks, "length": length, "direction": direction}
    if not bench.has(len(ways) * (1.2 * expected_s * (1.5 + turns_of(expected_s)) + 1)):
        for name in ways:
            bench.tell(**row, name=name, **more, left_out="no time left")
        return
    told: dict[str, dict[str, Any]] = {name: {} for name in ways}
    if dist.get_rank() < ranks:
        told = by_turns(bench, ways, tensors(length // ranks, bench.device), direction, group)
    for name, cells in told.items():
        bench.tell(**row, name=name, **more, **rated(bench, cells, work / ranks, direction))


def rated(bench: Bench, cells: Mapping[str, Any], work: float, direction: str) -> dict[str, Any]:
    """Return the cells of a row with the rate of a rank where they have a time. work: the FLOP of a rank."""
    if "ms" not in cells:
        return dict(cells)
    rate = work / cells["ms"] * 1e3
    return {**cells, "tflops_a_rank": round(rate / 1e12, 1), "of_alone": round(rate / bench.alone[direction], 4)}


def by_turns(bench: Bench, ways: Ways, leaves: list[Tensor], direction: str, group: Any) -> dict[str, dict[str, Any]]:
    """Return the time and the memory of each way, or why it has none: the median of some turns after a first run, which
    finds configs and tries each on the tensors."""
    turns = {name: partial(timed_turn, way, leaves, direction, bench.device, group) for name, way in ways.items()}
    found = {name: timed_row(bench, turn) for name, turn in turns.items()}
    times: dict[str, list[float]] = {name: [] for name, row in found.items() if "ms" in row}
    slowest_s = max((found[name]["ms"] / 1e3 for name in times), default=0.0)
    for _ in range(turns_of(slowest_s)):
        for name, spent in times.items():
            repeats = max(1, min(10, int(TURN_S / slowest_s)))
            spent.append(turns[name](repeats))
    for name, spent in times.items():
        found[name]["ms"] = round(median(spent) * 1e3, 4)
    return found


def turns_of(first_s: float) -> int:
    """Return how often a way is timed whose first run took this long."""
    return 5 if first_s < 0.5 else 3 if first_s < 2.0 else 1


def timed_turn(
    way: Way, leaves: list[Tensor], direction: str, device: torch.device, group: Any, repeats: int = 1
) -> float:
    """Return the time of a step of a way where it is called."""
    attend, within = way
    with within():
        return timed(partial(step, attend, leaves, direction), device, group, repeats)


def timed_row(bench: Bench, time_it: Callable[[], float]) -> dict[str, Any]:
    """Return the time and the memory of what is timed, or why it has none."""
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        spent = time_it()
    except FAILURES as error:
        return {"left_out": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    peak = torch.cuda.max_memory_allocated() / 2**30 if bench.device.type == "cuda" else 0.0
    return {"ms": round(spent * 1e3, 4), "peak_gib": round(peak, 3)}

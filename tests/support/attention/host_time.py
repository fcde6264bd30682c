"""Host time of calls: what passes until a call returns, whatever the GPU does meanwhile."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CALLS = 10_000
ROUNDS = 3
BATCH = 100
"""Calls between two waits for the GPU: a full queue makes the host wait."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """Host time of one call: median and 99th percentile, in microseconds."""

    median_us: float
    p99_us: float

    def __str__(self) -> str:
        return f"median {self.median_us:6.2f} us, p99 {self.p99_us:6.2f} us"

    @property
    def document(self) -> dict[str, float]:
        """As it is recorded."""
        return {"median_us": self.median_us, "p99_us": self.p99_us}


def host_time(call: Callable[[], Any], synchronise: Callable[[], Any] = lambda: None, calls: int = CALLS) -> HostTime:
    """The time of single calls, without that of the clock."""
    clock = time.perf_counter_ns
    empty, samples = [], []
    for index in range(calls + BATCH):
        if index % BATCH == 0:
            synchronise()
        start = clock()
        middle = clock()
        call()
        end = clock()
        if index >= BATCH:
            empty.append(middle - start)
            samples.append(end - middle)
    own = statistics.median(empty)
    ordered = sorted(samples)
    return HostTime((ordered[len(ordered) // 2] - own) / 1000, (ordered[len(ordered) * 99 // 100] - own) / 1000)


def calmest(calls: dict[str, Callable[[], Any]], count: int = CALLS) -> dict[str, HostTime]:
    """The host time of each, from the round in which other programs had the processor least; rounds by turns."""
    rounds = [
        {what: host_time(call, torch.cuda.synchronize, count) for what, call in calls.items()} for _ in range(ROUNDS)
    ]
    return {what: min((times[what] for times in rounds), key=lambda time: time.median_us) for what in calls}

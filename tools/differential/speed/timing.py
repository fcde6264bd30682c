"""Times of a case: the kernels by events in turns with a cold L2 cache, the host's part by its own clock."""

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from blocktune.tuner.measure.clock import CudaClock
from blocktune.tuner.measure.protocol import column, median_ratio
from tools.differential.speed.cases import SpeedCase
from tools.differential.speed.contenders import Launch, launches_of

ROUNDS = 15
MORE_ROUNDS = 45
"""Of a case that seems slower."""
HOST_CALLS, HOST_TURNS = 25, 9
MAX_RATIO, MAX_EXTRA_US = 1.03, 1.0
"""By how much a call may take longer than PyTorch's; a case is slower if it exceeds both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedResult:
    """Medians of a case in microseconds, and of ours over PyTorch's inside a round."""

    ours_us: float
    pytorch_us: float
    ratio: float
    ours_host_us: float
    pytorch_host_us: float
    error: str = ""

    @property
    def is_slower(self) -> bool:
        """Whether the kernels take longer than PyTorch's."""
        return bool(self.error) or _exceeds(self.ratio, self.ours_us - self.pytorch_us)

    @property
    def is_host_slower(self) -> bool:
        """Whether the host takes longer than for PyTorch's call."""
        ratio = self.ours_host_us / self.pytorch_host_us if self.pytorch_host_us else 1.0
        return _exceeds(ratio, self.ours_host_us - self.pytorch_host_us)

    def to_json(self) -> dict[str, Any]:
        """All fields, and the verdicts."""
        return asdict(self) | {"slower": self.is_slower, "host_slower": self.is_host_slower}


def _exceeds(ratio: float, extra_us: float) -> bool:
    return ratio > MAX_RATIO and extra_us > MAX_EXTRA_US


def time_case(case: SpeedCase, clock: CudaClock, *, kernels: bool) -> SpeedResult:
    """Return the times of a case."""
    try:
        launches = launches_of(case, kernels=kernels)
    except Exception as error:  # either contender may refuse or run out of memory: the case says so
        return SpeedResult(ours_us=0, pytorch_us=0, ratio=0, ours_host_us=0, pytorch_host_us=0, error=f"{error:.300}")
    hosts = _host_times(launches)
    result = _result(launches, clock, ROUNDS, hosts)
    return _result(launches, clock, MORE_ROUNDS, hosts) if result.is_slower else result


def _result(launches: tuple[Launch, Launch], clock: CudaClock, count: int, hosts: tuple[float, float]) -> SpeedResult:
    rounds = clock.rounds(launches, count)
    ours, pytorchs = column(rounds, 0), column(rounds, 1)
    return SpeedResult(
        ours_us=statistics.median(ours),
        pytorch_us=statistics.median(pytorchs),
        ratio=median_ratio(ours, pytorchs),
        ours_host_us=hosts[0],
        pytorch_host_us=hosts[1],
    )


def _host_times(launches: tuple[Launch, Launch]) -> tuple[float, float]:
    """Return the host's time of a call of each in microseconds, taken in turns while the GPU does not hold it up."""
    turns: list[list[float]] = [[], []]
    for _ in range(HOST_TURNS):
        for launch, found in zip(launches, turns, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                launch()
            found.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
    return statistics.median(turns[0]), statistics.median(turns[1])

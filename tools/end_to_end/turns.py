"""Steps of several programs timed in turns, so that a clock that sinks sinks for all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Run:
    """Some steps of one program. begin: puts it where it starts; step: one step."""

    begin: Callable[[], None]
    step: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds of a step of every program, and every other program's over the first one's by rounds."""

    step_us: dict[str, Spread]
    ratios: dict[str, Spread]


def in_turns(runs: Mapping[str, Run], device: torch.device, rounds: int, steps: int) -> Timed:
    """Time steps of all programs, round by round in another order, after one round that counts for nothing."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds + 1):
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            samples[name].append(_step_us(runs[name], device, steps))
    kept = {name: found[1:] for name, found in samples.items()}
    first, *others = names
    ratios = {
        name: Spread.of([theirs / ours for theirs, ours in zip(kept[name], kept[first], strict=True)])
        for name in others
    }
    return Timed({name: Spread.of(found) for name, found in kept.items()}, ratios)


def _step_us(run: Run, device: torch.device, steps: int) -> float:
    run.begin()
    _wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        run.step()
    _wait(device)
    return (time.perf_counter() - began) * MICROSECONDS / steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()

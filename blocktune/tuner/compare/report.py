"""The report on one shape's comparison: who took part, who did not and why, and the times."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blocktune.db.records.records import Regime
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compare.stock_autotune import StockTuning
from blocktune.tuner.measure.load import Load
from blocktune.tuner.search.verdict import speedup

PEERS = {
    "cudnn": "cuDNN",
    "fa2": "FlashAttention-2 in PyTorch",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "flex": "FlexAttention",
}
"""Contenders that others have written, by name, as tables call them. Those of a file have the name of their
function."""

TUNED, UNTUNED = "tuned", "untuned"
"""What a call out of the box gets, by whether the store has a winner of its shape."""

FEW_QUERIES = 16
"""Most queries with which a forward is bound by reading keys and values. Their rate is what counts then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRatio:
    """How much faster than the reference: median, 5th and 95th percentile of the ratios inside a round."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Median, 5th and 95th percentile of the rounds in microseconds.

    over_cudnn: cuDNN's time over this one; None where cuDNN did not run. over_best: the time of the fastest rival over
    this one; None where no rival ran. key_gbs: bytes of keys and values over the median, in 1e9 B/s; None but for few
    queries.
    """

    median_us: float
    low_us: float
    high_us: float
    tflops: float
    over_cudnn: SpeedRatio | None
    key_gbs: float | None = None
    over_best: SpeedRatio | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One contender. problem: why it was not timed; empty when its result agreed with the reference."""

    name: str
    config: KernelConfig | None = None
    problem: str = ""
    timing: Timing | None = None
    tuning: StockTuning | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "config": None if self.config is None else self.config.to_json(),
            "correct": not self.problem,
            "problem": self.problem,
            "timing": None if self.timing is None else asdict(self.timing),
            "tuning": None if self.tuning is None else self.tuning.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One shape's contenders, from one run of paired rounds.

    load: how the GPU worked during them; None where no contender was timed.
    """

    shape: AttentionShape
    regime: Regime
    entries: tuple[Entry, ...]
    rounds: int
    seconds: float
    load: Load | None = None

    @property
    def best_peer(self) -> str | None:
        """The name of the fastest rival; None where none was timed."""
        return fastest_peer({entry.name: entry.timing.median_us for entry in self.entries if entry.timing})

    @property
    def own(self) -> Entry | None:
        """What a call out of the box gets."""
        return self.entry(out_of_the_box([entry.name for entry in self.entries]))

    def entry(self, name: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.name == name), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": self.shape.to_json(),
            "label": self.shape.label,
            "regime": str(self.regime),
            "rounds": self.rounds,
            "seconds": round(self.seconds, 3),
            "best_peer": self.best_peer,
            "contenders": [entry.to_json() for entry in self.entries],
            "load": None if self.load is None else self.load.to_json(),
        }


def out_of_the_box(names: Collection[str]) -> str:
    """Return the contender's name that a call out of the box gets."""
    return UNTUNED if UNTUNED in names else TUNED


def fastest_peer(times_us: Mapping[str, float]) -> str | None:
    """Return the name of the fastest rival among contenders with their times; None where there is no rival."""
    return min(filter(is_peer, times_us), key=times_us.__getitem__, default=None)


def is_peer(name: str) -> bool:
    """Return whether others have written a contender."""
    return name in PEERS or ":" in name


def peer_title(name: str) -> str:
    """Return how tables call a contender that others have written."""
    return PEERS.get(name, name)


def timing_of(
    samples_us: Sequence[float],
    cudnn_us: Sequence[float] | None,
    best_us: Sequence[float] | None,
    flops: int,
    key_bytes: int | None = None,
) -> Timing:
    """Return the timing of a contender by its rounds, paired with cuDNN's and the fastest rival's.

    Args:
        samples_us: its rounds.
        cudnn_us: cuDNN's.
        best_us: those of the fastest rival.
        flops: of one launch.
        key_bytes: bytes of keys and values that one launch reads.
    """
    median_us = statistics.median(samples_us)
    twentieths = statistics.quantiles(samples_us, n=20, method="inclusive")
    return Timing(
        median_us=median_us,
        low_us=twentieths[0],
        high_us=twentieths[-1],
        tflops=1e-6 * flops / median_us,
        over_cudnn=_ratio(cudnn_us, samples_us),
        key_gbs=None if key_bytes is None else 1e-3 * key_bytes / median_us,
        over_best=_ratio(best_us, samples_us),
    )


def _ratio(peer_us: Sequence[float] | None, samples_us: Sequence[float]) -> SpeedRatio | None:
    if peer_us is None:
        return None
    gain = speedup(peer_us, samples_us)
    return SpeedRatio(median=gain.median, low=gain.low, high=gain.high)

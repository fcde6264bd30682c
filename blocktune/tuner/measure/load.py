"""The load of a GPU during a measurement, sampled from its beginning to its end.

    with Watch(monitor) as watch:
        rounds = clock.loaded_rounds(launches, seconds)
    watch.load()         # proves how the GPU worked: clock, power, share of the time at its power limit

NVML's power reading is a mean over the last second on large GPUs, so one sample of a measurement that takes a
fraction of that shows what ran before it. Power is therefore the energy counter's difference over the time, and only
where the measurement lasted at least `MIN_POWER_SECONDS`, since the counter moves about ten times per second.
"""

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

from blocktune.db.records.records import Telemetry

SAMPLE_SECONDS = 0.02
MIN_POWER_SECONDS = 1.0

POWER_CAP = 0x04
"""The clock event reason of `nvml.h`: the power limit holds the clock down."""

CAPPED_SHARE = 0.9
"""Share of the samples under the power limit from which on a load counts as held there."""


class Monitor(Protocol):
    """Reads the state of the GPU."""

    def sample(self) -> Telemetry: ...

    def energy_j(self) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How a GPU worked during a measurement; None where NVML has no answer.

    sm_clock_mhz: lowest, median and highest sample. power_w: mean. temperature_c: highest. capped: share of the samples
    in which the power limit held the clock down.
    """

    seconds: float
    samples: int
    sm_clock_mhz: tuple[int, int, int] | None
    power_w: float | None
    temperature_c: int | None
    capped: float | None

    @property
    def at_power_limit(self) -> bool:
        """Whether the power limit held the clock for nearly all of the measurement."""
        return self.capped is not None and self.capped >= CAPPED_SHARE

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"at_power_limit": self.at_power_limit}


class Watch:
    """Samples a monitor while the block runs, in a thread of its own."""

    def __init__(self, monitor: Monitor, interval_seconds: float = SAMPLE_SECONDS) -> None:
        self._monitor = monitor
        self._interval_seconds = interval_seconds
        self._samples: list[Telemetry] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._collect, name="blocktune-watch", daemon=True)
        self._seconds = 0.0
        self._energy_j: float | None = None

    def __enter__(self) -> Self:
        self._samples.append(self._monitor.sample())
        self._energy_begin_j = self._monitor.energy_j()
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._seconds = time.monotonic() - self._began
        energy_end_j = self._monitor.energy_j()
        if self._energy_begin_j is not None and energy_end_j is not None:
            self._energy_j = energy_end_j - self._energy_begin_j
        self._over.set()
        self._thread.join()

    def load(self) -> Load:
        """Return how the GPU worked, for a watch that has ended."""
        clocks = _known_values(self._samples, "sm_clock_mhz")
        reasons = _known_values(self._samples, "throttle_reasons")
        return Load(
            seconds=round(self._seconds, 3),
            samples=len(self._samples),
            sm_clock_mhz=(min(clocks), round(statistics.median(clocks)), max(clocks)) if clocks else None,
            power_w=self._power_w(),
            temperature_c=max(_known_values(self._samples, "temperature_c"), default=None),
            capped=sum(bool(each & POWER_CAP) for each in reasons) / len(reasons) if reasons else None,
        )

    def telemetry(self) -> Telemetry:
        """Return the samples as one: median clocks, the highest temperature, every throttle reason that occurred."""
        clocks, memory = _known_values(self._samples, "sm_clock_mhz"), _known_values(self._samples, "memory_clock_mhz")
        reasons = _known_values(self._samples, "throttle_reasons")
        return Telemetry(
            sm_clock_mhz=round(statistics.median(clocks)) if clocks else None,
            memory_clock_mhz=round(statistics.median(memory)) if memory else None,
            temperature_c=max(_known_values(self._samples, "temperature_c"), default=None),
            power_w=self._power_w(),
            throttle_reasons=_union(reasons) if reasons else None,
            other_processes=max(_known_values(self._samples, "other_processes"), default=None),
        )

    def _collect(self) -> None:
        while not self._over.wait(self._interval_seconds):
            self._samples.append(self._monitor.sample())

    def _power_w(self) -> float | None:
        if self._energy_j is None or self._seconds < MIN_POWER_SECONDS:
            return None
        return round(self._energy_j / self._seconds, 1)


def _known_values(samples: Sequence[Telemetry], name: str) -> list[int]:
    return [value for sample in samples if (value := getattr(sample, name)) is not None]


def _union(reasons: Sequence[int]) -> int:
    bits = 0
    for each in reasons:
        bits |= each
    return bits

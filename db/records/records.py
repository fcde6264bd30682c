"""What was measured, as frozen values. The store turns them into rows and back."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import AttentionShape

ORIGIN_RANK = {origin: rank for rank, origin in enumerate(Origin)}
"""How sure a winner is: of two, the one with the lower rank stays."""


class Outcome(StrEnum):
    """How one trial ended. Only `OK` has a time; a bad result is a result and is stored."""

    OK = "ok"
    PREDICTED = "predicted"  # compiled and ranked by the model for a device that is not here
    INFEASIBLE = "infeasible"
    COMPILE_ERROR = "compile_error"
    COMPILE_TIMEOUT = "compile_timeout"
    WRONG_RESULT = "wrong_result"
    RUN_ERROR = "run_error"
    RUN_TIMEOUT = "run_timeout"


class Regime(StrEnum):
    """How a GPU works while it is measured: tuner/measure/protocol.py says what is done for it."""

    BURST = "burst"
    """It rests before every round and stays cool."""
    SUSTAINED = "sustained"
    """It works without a break, large ones at their power cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The software and the regime that a time depends on. Two trials with equal `digest` are comparable."""

    triton: str
    ptxas: str
    torch: str
    cuda: str = ""
    driver: str = ""
    protocol: int = 1  # version of the measuring protocol, tuner/measure/protocol.py
    power_limit_w: int = 0
    regime: Regime = Regime.SUSTAINED

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Plain values; without the regime where it is sustained, as all was before the word came up. So old digests
        and documents stay true, and older versions read new ones."""
        values = asdict(self) | {"regime": str(self.regime)}
        if self.regime is Regime.SUSTAINED:
            del values["regime"]
        return values

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """What `to_json` described.

        Raises:
            TypeError: a field is missing or unknown.
            ValueError: there is no such regime.
        """
        return cls(**dict(data) | {"regime": Regime(data.get("regime", Regime.SUSTAINED))})


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """The state of the GPU during one measurement, by NVML; None where NVML has no answer.

    Clocks are medians, the temperature is the highest, and throttle_reasons has every reason that occurred. power_w is
    the mean of measurements that took a second or more, and None for shorter ones: NVML's own power is a mean over the
    last second, so a sample of a candidate's rounds shows what ran before them.
    """

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle_reasons: int | None = None
    other_processes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Hold one candidate and how it ended.

    samples_us: the timed rounds.
    time_us: the median of samples_us.
    relative_to_anchor: the median of time over the anchor's time in the same round; None when it was not timed.
    error: why there is no time. Where there is a time, how it was taken if not as usual: twice, or with few rounds.
    imported: it came in a document and was not made again here; such a trial never counts as one of this machine.
    """

    device: DeviceSpec
    environment: Environment
    shape: AttentionShape
    config: KernelConfig
    kernel_hash: str
    outcome: Outcome
    resources: KernelResources | None = None
    blocks_per_sm: int | None = None
    occupancy: float | None = None
    limiters: tuple[str, ...] = ()
    predicted_us: float | None = None
    time_us: float | None = None
    relative_to_anchor: float | None = None
    samples_us: tuple[float, ...] = ()
    error: str = ""
    compile_seconds: float = 0.0
    bench_seconds: float = 0.0
    telemetry: Telemetry = field(default_factory=Telemetry)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    imported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The winner of one shape on one device, with its provenance.

    speedup_over_default and its low/high are ratios of the default's time to the winner's in the interleaved final
    rounds (median, 5th and 95th percentile); None when nothing was measured.
    """

    device: DeviceSpec
    environment: Environment
    shape: AttentionShape
    config: KernelConfig
    kernel_hash: str
    origin: Origin
    time_us: float | None = None
    predicted_us: float | None = None
    default: KernelConfig | None = None
    default_time_us: float | None = None
    paper: KernelConfig | None = None
    paper_time_us: float | None = None
    speedup_over_default: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    trials: int = 0
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))

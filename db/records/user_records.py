"""What was measured of users' kernels, as frozen values."""

from dataclasses import dataclass, field
from datetime import UTC, datetime

from blocktune.db.records.records import Environment, Outcome
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.tuned.config import Problem, UserConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTrial:
    """One candidate and how it ended; the fields mean what those of `Trial` mean."""

    device: DeviceSpec
    environment: Environment
    problem: Problem
    config: UserConfig
    source_hash: str
    outcome: Outcome
    time_us: float | None = None
    relative_to_anchor: float | None = None
    samples_us: tuple[float, ...] = ()
    error: str = ""
    seconds: float = 0.0
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(frozen=True, slots=True, kw_only=True)
class UserBest:
    """The winner of one problem on one device, which was measured there; the fields mean what those of `Best` mean."""

    device: DeviceSpec
    environment: Environment
    problem: Problem
    config: UserConfig
    source_hash: str
    time_us: float
    default: UserConfig
    default_time_us: float | None = None
    speedup_over_default: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    trials: int = 0
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))

"""What was measured of users' kernels, as frozen values."""

from dataclasses import dataclass, field
from datetime import UTC, datetime

from blocktune.db.records.records import Environment, Outcome
from blocktune.db.tables.columns import UserBestColumns, UserTrialColumns
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.tuned.config import Problem, UserConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTrial(UserTrialColumns):
    """One candidate and how it ended."""

    device: DeviceSpec
    environment: Environment
    problem: Problem
    config: UserConfig
    source_hash: str
    outcome: Outcome
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(frozen=True, slots=True, kw_only=True)
class UserBest(UserBestColumns):
    """The winner of one problem on one device, which was measured there."""

    device: DeviceSpec
    environment: Environment
    problem: Problem
    config: UserConfig
    source_hash: str
    default: UserConfig
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))

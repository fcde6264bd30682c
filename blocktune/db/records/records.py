"""Measurements as frozen values. The store turns them into rows and back; db/tables/columns.py declares what of them is
a number, a text or a list of either."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Generic, Self

from typing_extensions import TypeVar

from blocktune.db.tables.columns import BestColumns, TrialColumns
from blocktune.db.tables.columns import Telemetry as Telemetry
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.autotuned.config import KernelProblem, LaunchConfig

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


class Objective(StrEnum):
    """The quantity by which the finals choose a winner."""

    TIME = "time"
    ENERGY = "energy"
    """Of a launch, by NVML's counter of the whole card."""


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
        """Return plain values; without the regime where it is sustained, as all was before the word came up. So old
        digests and documents stay true, and older versions read new ones."""
        values = asdict(self) | {"regime": str(self.regime)}
        if self.regime is Regime.SUSTAINED:
            del values["regime"]
        return values

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return what `to_json` described.

        Raises:
            TypeError: a field is missing or unknown.
            ValueError: there is no such regime.
        """
        return cls(**dict(data) | {"regime": Regime(data.get("regime", Regime.SUSTAINED))})


ProblemT = TypeVar("ProblemT", bound=AttentionShape | KernelProblem, default=AttentionShape)
ConfigT = TypeVar("ConfigT", bound=KernelConfig | LaunchConfig, default=KernelConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(TrialColumns, Generic[ProblemT, ConfigT]):
    """Hold one candidate and how it ended; of attention unless the types say otherwise.

    kernel_hash: of the kernel's source.
    resources: what the compiled code takes; None when it never compiled.
    imported: it came in a document and was not made again here; such a trial never counts as one of this machine.
    """

    device: DeviceSpec
    environment: Environment
    shape: ProblemT
    config: ConfigT
    kernel_hash: str
    outcome: Outcome
    resources: KernelResources | None = None
    telemetry: Telemetry = field(default_factory=Telemetry)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    imported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Best(BestColumns, Generic[ProblemT, ConfigT]):
    """The winner of one shape on one device, with its provenance; of attention unless the types say otherwise.

    Sources of one autotuned kernel have winners of their own.

    default, paper: what it was compared with: the kernel's default, or the first config of a list, and the paper's
        rule.
    """

    device: DeviceSpec
    environment: Environment
    shape: ProblemT
    config: ConfigT
    kernel_hash: str
    origin: Origin
    default: ConfigT | None = None
    paper: ConfigT | None = None
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def speedup_json(self) -> dict[str, float | None] | None:
        """The speedup over the default with its bounds; None where the default was not measured."""
        if self.speedup_over_default is None:
            return None
        return {"median": self.speedup_over_default, "low": self.speedup_low, "high": self.speedup_high}


KernelTrial = Trial[KernelProblem, LaunchConfig]
KernelBest = Best[KernelProblem, LaunchConfig]
"""Of autotuned kernels."""

AnyTrial = Trial[Any, Any]
AnyBest = Best[Any, Any]
Record = AnyTrial | AnyBest


def of_attention(records: Iterable[Record]) -> list[Any]:
    """Return the records of attention, for what knows shapes alone."""
    return [record for record in records if isinstance(record.shape, AttentionShape)]


def problem_label(problem: AttentionShape | KernelProblem) -> str:
    """Return what names a problem among those of all kernels."""
    return problem.label if isinstance(problem, AttentionShape) else problem.full_label


def problem_json(problem: AttentionShape | KernelProblem) -> dict[str, Any]:
    """Return what was tuned as plain values with its short name, as every command prints it."""
    if isinstance(problem, AttentionShape):
        return problem.to_json() | {"label": problem.label}
    return {"kernel": problem.kernel, "key": dict(problem.problem.arguments), "label": problem.label}

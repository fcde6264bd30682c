"""The input and output of a tuning run: its budget, its progress and its report."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from blocktune.db.records.records import AnyBest, AnyTrial, ConfigT, Outcome, problem_json
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.cost.bands import predicted_json, predicted_text
from blocktune.tuner.measure.measurement import REPEATED
from blocktune.tuner.measure.telemetry import disturbances
from blocktune.tuner.occupancy.calculator import Occupancy

AnyConfig = KernelConfig | LaunchConfig

SCHEMA = 1
"""Version of the JSON form of a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When a search ends, apart from having tried everything. None is no bound.

    trials counts configs, those of earlier runs included. seconds is wall time of the search. It does not count the
    start of the GPU worker's process and the finals, which take about ten seconds more.

    Raises:
        UsageError: a bound is not positive.
    """

    trials: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.trials is not None and (type(self.trials) is not int or self.trials < 1):
            raise UsageError(f"`trials >= 1` must hold, but got trials={self.trials!r}. Leave it out for the default.")
        if self.seconds is not None and not (isinstance(self.seconds, int | float) and 0 < self.seconds < math.inf):
            raise UsageError(f"`time budget > 0 s` must hold, but got {self.seconds!r}. Leave it out for the default.")


MEASURED_BUDGET = Budget(trials=24, seconds=60.0)
"""Default with a GPU: a few more than the measurements after which replayed searches are at the best
(notes/models/search.md), and what 15 processes compile in two turns."""

PREDICTED_BUDGET = Budget(trials=24, seconds=4.0)
"""Default without a GPU. The model orders the configs before any is compiled, and its first choice is rarely beaten by
a later one (notes/models/search.md), so few of them are compiled, and the answer comes within ten seconds."""


def effective_budget(budget: Budget, *, present: bool, exhaustive: bool) -> Budget:
    """Return the bounds that a search keeps to. Where one bound is given, the default of the other must
    not end the search first.

    Args:
        budget: what was given.
        present: whether the device is here, so that configs are measured.
        exhaustive: whether every config is tried, whatever the budget; seconds that were given hold all the same.
    """
    if exhaustive:
        return Budget(seconds=budget.seconds)
    if budget.trials is None and budget.seconds is None:
        return MEASURED_BUDGET if present else PREDICTED_BUDGET
    return budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """When a search stops: a `Budget` without open bounds.

    trials: after this many, those of earlier runs included.
    seconds: after this many from now.
    """

    trials: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Generic[ConfigT]):
    """Where a run stands. phase: `compile`, `search`, `finals` or `wait`. done and total count configs; compiled those
    that are compiled and wait, compiling those that are not yet. eta_seconds is None while nothing is known. measuring:
    the config that is measured from now on, said before it can do harm."""

    phase: str
    done: int
    total: int
    compiled: int = 0
    compiling: int = 0
    outcomes: Mapping[Outcome, int] = field(default_factory=dict)
    best: ConfigT | None = None
    best_us: float | None = None
    elapsed_seconds: float = 0.0
    eta_seconds: float | None = None
    message: str = ""
    measuring: ConfigT | None = None


OnProgress = Callable[[Progress[Any]], None]


@dataclass(repr=False, frozen=True, slots=True, kw_only=True)
class TuningReport:
    """The end of a run.

    best: as stored, or as it would be. reason: why this config won. occupancy: of the winner. outcomes: trials of the
    shape's current kernels by outcome, `resumed` of them from earlier runs. dropped: configs that a rule dropped, by
    rule. unsupported: kernels that cannot compute the shape. stored: whether `best` was stored. interrupted: the user
    ended the run early; every trial until then is kept. ended_by: the bound that ended the search before every config
    was tried, `trials` or `seconds`; empty if none did. notes: what disturbed the measuring. predicted_us: what the
    model says of the tried configs.
    """

    best: AnyBest
    reason: str
    occupancy: Occupancy | None
    outcomes: Mapping[Outcome, int]
    resumed: int
    feasible: int
    dropped: Mapping[str, int]
    unsupported: Mapping[str, str]
    seconds: float
    stored: bool
    interrupted: bool = False
    ended_by: str = ""
    notes: tuple[str, ...] = ()
    predicted_us: Mapping[Any, float | None] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return what `print` shows: the winner, the configs that it was compared with, and why it won."""
        best = self.best
        rivals = (
            ("winner", best.config, best.time_us),
            ("default", best.default, best.default_time_us),
            ("FA heuristic", best.paper, best.paper_time_us),
        )
        lines = [f"{best.shape.label} on {best.device.name}, {best.origin}"]
        lines += [
            f"{name}: {config.label}{self._cost(config, us)}" for name, config, us in rivals if config is not None
        ]
        tried = ", ".join(f"{count} {str(outcome).replace('_', ' ')}" for outcome, count in self.outcomes.items())
        return "\n".join([*lines, self.reason, f"{self.feasible} configs can run; tried: {tried}"])

    def __repr__(self) -> str:
        """Return what `print` shows."""
        return str(self)

    def _cost(self, config: AnyConfig, time_us: float | None) -> str:
        """Return the time of a config as the end of a line; a predicted one says so."""
        if time_us is not None:
            return f", {time_us:,.1f} µs"
        time = predicted_text(self.predicted_us.get(config), config.kernel, self.best.shape, self.best.device)
        return "" if time == "-" else f", predicted {time}"

    def to_json(self) -> dict[str, Any]:
        best = self.best
        return {
            "schema": SCHEMA,
            "device": best.device.to_json(),
            "shape": problem_json(best.shape),
            "best": {
                "kernel": best.config.kernel,
                "config": best.config.to_json(),
                "time_us": best.time_us,
                "energy_mj": best.energy_mj,
                **predicted_json(best.predicted_us, best.config.kernel, best.shape, best.device),
                "origin": str(best.origin),
                "reason": self.reason,
            },
            "default": self._rival(best.default, best.default_time_us, best.default_energy_mj),
            "paper": self._rival(best.paper, best.paper_time_us, best.paper_energy_mj),
            "objective": best.objective,
            "speedup_over_default": best.speedup_json,
            "occupancy": self.occupancy.to_json() if self.occupancy else None,
            "outcomes": {str(outcome): count for outcome, count in self.outcomes.items()},
            "resumed": self.resumed,
            "feasible": self.feasible,
            "dropped": dict(self.dropped),
            "unsupported": dict(self.unsupported),
            "environment": {
                "digest": best.environment.digest,
                "triton": best.environment.triton,
                "regime": str(best.environment.regime),
            },
            "seconds": round(self.seconds, 3),
            "stored": self.stored,
            "interrupted": self.interrupted,
            "ended_by": self.ended_by,
            "notes": list(self.notes),
        }

    def _rival(self, config: AnyConfig | None, time_us: float | None, energy_mj: float | None) -> dict[str, Any] | None:
        if config is None:
            return None
        costs = {"time_us": time_us, "energy_mj": energy_mj}
        predicted = predicted_json(self.predicted_us.get(config), config.kernel, self.best.shape, self.best.device)
        return {"kernel": config.kernel, "config": config.to_json()} | costs | predicted


def disturbance_notes(trials: Sequence[AnyTrial], finals: str) -> tuple[str, ...]:
    """Return what disturbed the trials that have a time, and the finals."""
    timed = [trial for trial in trials if trial.outcome is Outcome.OK]
    repeated = sum(trial.error.startswith(REPEATED) for trial in timed)
    notes = disturbances(trial.telemetry for trial in timed)
    if repeated:
        notes += (f"{repeated} of {len(timed)} trials were measured twice, since something disturbed them",)
    return notes if not finals else (*notes, f"the finals were {finals}")

"""The unit of work where many searches run: a shape, or a call of an autotuned kernel, and the events of its worker."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from blocktune.db.records.records import Objective, Outcome, Regime
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.drop_in.request import LaunchRequest
from blocktune.tuner.search.arguments import SearchOptions
from blocktune.tuner.search.report import Budget, Progress
from blocktune.tuner.search.strategies import DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One shape or call to tune, as plain values that any process understands.

    device: `DeviceSpec.key` of the kind of GPU; a worker on another kind must not make it. database: path or URL of the
    store, None for the user's. kernels: names of those that are searched; None is all. configs: how many an exhaustive
    search tries; 0 is unknown. known: what the store holds, as `packed`, where the worker cannot reach it and has one
    of its own; None is where it can. lethal: configs that killed workers. excluded: software that must not measure,
    such as `triton=3.5`. The rest as in `tune`.
    """

    shape: AttentionShape | LaunchRequest
    device: str
    database: str | None = None
    budget: Budget = field(default_factory=Budget)
    kernels: tuple[str, ...] | None = None
    exhaustive: bool = False
    configs: int = 0
    regime: Regime | None = None
    objective: Objective = Objective.TIME
    sampler: str = DEFAULT
    study: str | None = None
    seed: int = 0
    known: tuple[Mapping[str, Any], ...] | None = field(default=None, compare=False)
    lethal: tuple[KernelConfig | LaunchConfig, ...] = ()
    excluded: tuple[str, ...] = ()

    @property
    def size(self) -> tuple[int, int]:
        """A measure of how long it takes: an exhaustive search by its configs, a bounded one by what a launch
        computes."""
        return self.configs if self.exhaustive else 0, self.shape.flops

    @property
    def options(self) -> SearchOptions:
        """How the search goes."""
        return SearchOptions(**{field.name: getattr(self, field.name) for field in fields(SearchOptions)})

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": self.shape.to_json(),
            "device": self.device,
            "database": self.database,
            "trials": self.budget.trials,
            "seconds": self.budget.seconds,
            "kernels": None if self.kernels is None else list(self.kernels),
            "exhaustive": self.exhaustive,
            "configs": self.configs,
            "regime": None if self.regime is None else str(self.regime),
            "objective": str(self.objective),
            "sampler": self.sampler,
            "study": self.study,
            "seed": self.seed,
            "known": None if self.known is None else list(self.known),
            "lethal": [config.to_json() for config in self.lethal],
            "excluded": list(self.excluded),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            shape=_shape_from(data["shape"]),
            device=data["device"],
            database=data["database"],
            budget=Budget(trials=data["trials"], seconds=data["seconds"]),
            kernels=None if data["kernels"] is None else tuple(data["kernels"]),
            exhaustive=data["exhaustive"],
            configs=data["configs"],
            regime=None if data["regime"] is None else Regime(data["regime"]),
            objective=Objective(data["objective"]),
            sampler=data["sampler"],
            study=data["study"],
            seed=data["seed"],
            known=None if data["known"] is None else tuple(data["known"]),
            lethal=tuple(map(config_from, data["lethal"])),
            excluded=tuple(data["excluded"]),
        )


@dataclass(frozen=True, slots=True)
class Started:
    """A worker has taken a job up."""

    job: Job
    worker: str


@dataclass(frozen=True, slots=True)
class Advanced:
    """Where a job stands."""

    job: Job
    worker: str
    progress: Progress[Any]


@dataclass(frozen=True, slots=True)
class Finished:
    """A job has its result: `TuningReport.to_json`, the one of an interrupted search included."""

    job: Job
    worker: str
    report: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """A job has no result and is not tried again. exit_code: what the command line returns for it."""

    job: Job
    error: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker died while it made a job, which may not be the cause, and the job waits for another worker.

    retired: the worker gets no further jobs, since several in a row killed it.
    """

    job: Job
    worker: str
    reason: str
    retired: bool


Event = Started | Advanced | Finished | Failed | WorkerLost


def _shape_from(data: dict[str, Any]) -> AttentionShape | LaunchRequest:
    return LaunchRequest.from_json(data) if "arguments" in data else AttentionShape.from_json(data)


def config_from(data: dict[str, Any]) -> KernelConfig | LaunchConfig:
    """Return a config of a shape or of an autotuned kernel that `to_json` described."""
    return LaunchConfig.from_json(data) if "parameters" in data else KernelConfig.from_json(data)


def progress_json(progress: Progress[Any]) -> dict[str, Any]:
    """Return a progress as plain values."""
    return {
        "phase": progress.phase,
        "done": progress.done,
        "total": progress.total,
        "compiled": progress.compiled,
        "compiling": progress.compiling,
        "outcomes": {str(outcome): count for outcome, count in progress.outcomes.items()},
        "best": None if progress.best is None else progress.best.to_json(),
        "best_us": progress.best_us,
        "elapsed_seconds": progress.elapsed_seconds,
        "eta_seconds": progress.eta_seconds,
        "message": progress.message,
        "measuring": None if progress.measuring is None else progress.measuring.to_json(),
    }


def progress_from(data: Mapping[str, Any]) -> Progress[Any]:
    """Return the progress that `progress_json` described."""
    best, outcomes, measuring = data["best"], data["outcomes"], data["measuring"]
    values = dict(data) | {
        "best": None if best is None else config_from(best),
        "measuring": None if measuring is None else config_from(measuring),
        "outcomes": {Outcome(name): count for name, count in outcomes.items()},
    }
    return Progress(**values)

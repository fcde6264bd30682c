"""Terms and results of a runner: one measurement each, or paired rounds of finalists."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Annotated, Any, Generic, Self

from blocktune.db.records.records import AnyTrial, ConfigT, Outcome, Regime, Telemetry, Trial
from blocktune.db.tables.columns import ANCHOR_RATIO, ERROR, ROUNDS, TIME
from blocktune.kernels.values.column_kinds import plain_values, record_values
from blocktune.tuner.measure.energy import Burst

OUT_OF_MEMORY = "out_of_memory"
"""What a worker calls a failed allocation: of a shape it is the user's error, of a config a `run_error`."""

REPEATED = "measured twice, since "
"""How the remark of a measurement begins that was made again because something disturbed the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which terms the configs of a shape are measured.

    seed: of the inputs. regime: how the GPU works meanwhile. race: candidates that are clearly slower than the best so
    far are stopped early.
    """

    seed: int = 0
    regime: Regime = Regime.SUSTAINED
    race: bool = True

    def to_json(self) -> dict[str, Any]:
        return {"seed": self.seed, "regime": str(self.regime), "race": self.race}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(seed=data["seed"], regime=Regime(data["regime"]), race=data["race"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """How one config did. Only the outcome `ok` has times; see `tuner/measure/protocol.py` for how they are taken.

    samples_us: its rounds.
    time_us: their median.
    relative_to_anchor: median of its time over the anchor's in the same round; 1.0 if it is the anchor.
    error: why there is no time, or, where there is a time, how it was taken when not as usual.
    seconds: wall time that the measurement took.
    transient: it failed by the machine, such as by a full disk or memory, so that the config may be measured later.
    """

    outcome: Outcome
    time_us: Annotated[float | None, TIME] = None
    relative_to_anchor: Annotated[float | None, ANCHOR_RATIO] = None
    samples_us: Annotated[tuple[float, ...], ROUNDS] = ()
    error: Annotated[str, ERROR] = ""
    seconds: float = 0.0
    telemetry: Telemetry = field(default_factory=Telemetry)
    transient: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return what a worker knows and its parent does not."""
        return {"outcome": str(self.outcome), **plain_values(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the measurement that a worker described."""
        return cls(outcome=Outcome(data["outcome"]), **record_values(cls, SimpleNamespace(**data)))

    def trial_values(self) -> dict[str, Any]:
        """Return what a trial keeps of the measurement, by the trial's fields."""
        kept = {field.name for field in fields(Trial)}
        values = {field.name: getattr(self, field.name) for field in fields(self)} | {"bench_seconds": self.seconds}
        return {name: value for name, value in values.items() if name in kept}

    @classmethod
    def of_trial(cls, trial: AnyTrial) -> Self:
        """Return the measurement that a trial was made of."""
        names = {field.name for field in fields(cls)} & {field.name for field in fields(trial)}
        return cls(seconds=trial.bench_seconds, **{name: getattr(trial, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finals(Generic[ConfigT]):
    """Finalists timed in turns. All samples_us have one entry per round, so entries of equal index are pairs.

    failures: finalists that were measured before and failed now. disturbance: what disturbed the rounds, and the
    rounds before that were thrown away for it; empty when nothing did. telemetry: the GPU during them.
    """

    samples_us: Mapping[ConfigT, tuple[float, ...]]
    failures: Mapping[ConfigT, Measurement] = field(default_factory=dict)
    disturbance: str = ""
    telemetry: Telemetry = field(default_factory=Telemetry)


@dataclass(frozen=True, slots=True, kw_only=True)
class Energies(Generic[ConfigT]):
    """Bursts of configs in turns. All have one burst per round, so bursts of equal index are pairs.

    bursts: empty where the GPU has no counter of its energy. disturbance: what disturbed them; empty when nothing did.
    """

    bursts: Mapping[ConfigT, tuple[Burst, ...]] = field(default_factory=dict)
    disturbance: str = ""

    def energy_mj(self, config: ConfigT | None) -> float | None:
        """Return the median energy of a launch; None where it was not measured."""
        rounds = self.bursts.get(config) if config is not None else None
        return statistics.median(burst.energy_mj for burst in rounds) if rounds else None

    def power_w(self, config: ConfigT) -> float | None:
        """Return the median of the bursts' mean powers; None where it was not measured."""
        rounds = self.bursts.get(config)
        return statistics.median(burst.power_w for burst in rounds) if rounds else None

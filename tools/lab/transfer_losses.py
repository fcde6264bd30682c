"""How far what was measured on one device holds on another one of its compute capability.

    for case in decisions(there, here): print(case.shape.label, case.own, case.other)

Two questions. What winners lose: a shape that both devices were tuned for, and the other one's winner timed here in one
run of finals with the own one. What decisions lose: a shape of a recorded sweep, decided for by what was measured here,
by what was measured there, and by the cost model alone, whose constants were fitted to the sweeps of either.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blocktune.db.records.records import Best
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.selection.correction import DeviceCorrection
from blocktune.tuner.cost.constants import CostConstants
from blocktune.tuner.lab.measured_shapes import promising
from blocktune.tuner.lab.replay import Replay
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.lab.untuned import UntunedStudy, Without, family_of
from blocktune.tuner.search.verdict import decide_by_predictions

RoundsOfShape = Mapping[str, Mapping[KernelConfig, float]]
"""Times over the default's in one run of finals, by the label of the shape and the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A shape that two devices have a winner of. slowdown: of the other one's winner here, over the own one; None where
    they are different and never met here."""

    shape: AttentionShape
    own: KernelConfig
    other: KernelConfig
    slowdown: float | None

    def to_json(self) -> dict[str, Any]:
        return _of_shape(self.shape) | {
            "own": self.own.to_json(),
            "other": self.other.to_json(),
            "slowdown": None if self.slowdown is None else round(self.slowdown, 5),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A sweep of a device: how much slower than its best what is taken is, as ratios of times.

    own, other: the one decision, by what was measured here and there; neither knows the shape. default: the first
    kernel's. model: the cost model alone, by whose sweeps its constants were fitted to.
    """

    shape: AttentionShape
    own: float
    other: float
    default: float
    model: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        ratios = {"own": self.own, "other": self.other, "default": self.default}
        return (
            _of_shape(self.shape)
            | {name: round(ratio, 5) for name, ratio in ratios.items()}
            | {"model": {name: round(ratio, 5) for name, ratio in self.model.items()}}
        )


def shared_shapes(own: Iterable[Best], other: Iterable[Best], rounds: RoundsOfShape) -> Iterator[Moved]:
    """Yield the shapes that both devices have winners of.

    Args:
        own: winners of the device.
        other: winners of the other device.
        rounds: how different winners did here; the default met the own winner in the finals of its search.
    """
    there = {best.shape: best.config for best in other}
    for best in own:
        if best.shape in there:
            config = there[best.shape]
            slowdown = _slowdown(best, config, rounds.get(best.shape.label, {}))
            yield Moved(shape=best.shape, own=best.config, other=config, slowdown=slowdown)


def _slowdown(best: Best, config: KernelConfig, met: Mapping[KernelConfig, float]) -> float | None:
    """Return a config's time over a winner's; None where they never met."""
    if config == best.config:
        return 1.0
    if config in met and best.config in met:
        return met[config] / met[best.config]
    return best.speedup_over_default if config == best.default else None


def decisions(
    here: UntunedStudy, there: UntunedStudy, sweeps: Sequence[Sweep], fitted: Mapping[str, CostConstants]
) -> Iterator[Decision]:
    """Yield what is taken for every recorded shape of a device.

    Args:
        here: what was measured on it.
        there: what was measured on the other one.
        sweeps: those of the device.
        fitted: constants of the model, by whose sweeps they were fitted to.
    """
    of_shape = {sweep.shape: sweep for sweep in sweeps}
    foreign_trust = there.fit(there.recorded)
    for case in here.cases(Without.SHAPE):
        known = tuple(promising([one for one in there.recorded if one.shape != case.shape]))
        foreign = DeviceCorrection(device=there.device.key, trust=foreign_trust, measured=known)
        sweep = of_shape[case.shape]
        yield Decision(
            shape=case.shape,
            own=case.expected,
            other=here.slowdown_by(case.shape, foreign),
            default=case.default,
            model={name: model_slowdown(sweep, constants) for name, constants in fitted.items()},
        )


def model_slowdown(sweep: Sweep, constants: CostConstants) -> float:
    """Return how much slower than the best the model's choice among the configs of a sweep is."""
    replay = Replay(sweep, constants)
    scores = sweep.scores
    default = replay.serving[0].default_config(sweep.shape, sweep.device.limits)
    times = {config: time_us for config, time_us in replay.predicted.items() if config in scores}
    return scores[decide_by_predictions(times, default)] / min(scores.values())


def _of_shape(shape: AttentionShape) -> dict[str, Any]:
    return {"shape": shape.to_json() | {"label": shape.label}, "family": family_of(shape)}

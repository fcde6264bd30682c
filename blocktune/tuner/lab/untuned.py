"""The configs that untuned shapes get, judged by leaving recorded sweeps out: the one decision against the nearest
winner.

    study = UntunedStudy(sweeps, bests)
    for case in study.cases(Without.SHAPE):
        print(case.shape.label, case.expected, case.nearest, case.default)

Each case is a recorded sweep of which the decision knows nothing: neither that shape's sweep nor its stored winner, or
nothing of its whole family. The constants of the decision (`Trust`) are then those fitted to the other shapes.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, partial
from statistics import fmean, geometric_mean
from typing import Any, Self

from blocktune.db.records.records import Best
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import ComputeLimits, DeviceSpec
from blocktune.kernels.registry import kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.runtime.selection.correction import DeviceCorrection, LogRatio, Measured, RelativeConfig, Trust
from blocktune.runtime.selection.expectation import Estimator
from blocktune.runtime.selection.fallback import ConfigTable, climb_down
from blocktune.runtime.selection.ladder import Candidate
from blocktune.runtime.selection.untuned import Untuned
from blocktune.runtime.store_reader.tuned_config import TunedConfig
from blocktune.tuner.cost.bands import Band, BandKey, is_decoding
from blocktune.tuner.cost.ranking import usefulness
from blocktune.tuner.lab.error_bands import error_bands
from blocktune.tuner.lab.measured_shapes import promising, recorded_best, recorded_sweep
from blocktune.tuner.lab.sweep_file import Sweep

GRID = {"drift": (0.04, 0.06, 0.08, 0.1), "shift": (0.5, 0.75, 1.0), "doubt": (0.1, 0.15, 0.2)}
"""The constants that are fitted, and their choices; `prior` is half of `doubt`. The others are of measuring."""

JUDGED = 8
"""Configs of a kernel whose guesses are compared with their measurements: those that look best beforehand."""

HIGHEST = 0.5
"""Logarithms of ratios above this one count as this: how slow a config is that is not taken does not matter."""

FAMILIES = ("forward, full", "forward, causal", "backward", "decoding")
"""Families of shapes."""


class Without(StrEnum):
    """The knowledge that a decision lacks about the shape that it is judged by."""

    SHAPE = "shape"
    FAMILY = "family"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One sweep: how much slower than its best the configs are that each rule takes, as ratios of times.

    expected: by the one decision. nearest: by the nearest winner, as before there was one. default: the kernel's.
    passed_over: choices of the decision that the sweep does not hold.
    """

    shape: AttentionShape
    expected: float
    nearest: float
    default: float
    config: KernelConfig
    passed_over: int

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": self.shape.to_json() | {"label": self.shape.label},
            "family": family_of(self.shape),
            "expected": self.expected,
            "nearest": self.nearest,
            "default": self.default,
            "config": self.config.to_json(),
            "passed_over": self.passed_over,
        }


@dataclass(frozen=True, slots=True)
class _Scored:
    """A sweep's shape and scores, which take a while to be found."""

    shape: AttentionShape
    limits: ComputeLimits
    scores: Mapping[KernelConfig, float]

    @classmethod
    def of(cls, sweep: Sweep) -> Self:
        return cls(sweep.shape, sweep.device.limits, sweep.scores)


class UntunedStudy:
    """Recorded sweeps and winners of one device; shapes are left out in turn."""

    def __init__(self, sweeps: Sequence[Sweep], bests: Iterable[Best] = ()) -> None:
        known = list(bests)
        self._device, self._recorded_sweeps = sweeps[0].device, sweeps
        of_sweeps = [(sweep, recorded_sweep(sweep)) for sweep in sweeps]
        self.sweeps = [scored for sweep, found in of_sweeps if _can_judge(scored := _Scored.of(sweep), found)]
        everything = [*(found for _, found in of_sweeps), *map(recorded_best, known)]
        self.recorded: list[Measured] = [one for one in everything if one is not None]
        self._measured = {sweep.shape: found for sweep, found in of_sweeps if found is not None}
        self._winners = [
            TunedConfig(shape=best.shape, config=best.config, origin=best.origin, time_us=best.time_us)
            for best in known
        ]
        self._predict = cache(usefulness)

    @property
    def device(self) -> DeviceSpec:
        return self._device

    def error_bands(self) -> dict[BandKey, Band]:
        """Return the error bands of the cost model on these sweeps."""
        return error_bands(self._recorded_sweeps)

    def cases(self, without: Without, tell: Callable[[str], None] = lambda _: None) -> Iterator[Case]:
        """Yield every sweep, judged by what is known without it; so are the constants of the decision."""
        for sweep in self.sweeps:
            others = self._others(sweep.shape, without)
            case = self.case(sweep, self.fit(others), others)
            tell(f"{sweep.shape.label}: {case.expected:.3f}")
            yield case

    def fit(self, recorded: Sequence[Measured]) -> Trust:
        """Return the constants by which the ratios measured for the sweeps among these, each left out in turn, are the
        likeliest. Without a sweep among them they are the usual ones."""
        shapes = {one.shape for one in recorded}
        surprise = dict.fromkeys(_grid(), 0.0)
        for sweep in self.sweeps:
            if sweep.shape in shapes:
                others = self._knowledge([one for one in recorded if one.shape != sweep.shape])
                correction = DeviceCorrection(device=self.device.key, measured=others.measured)
                estimator = Estimator(sweep.shape, correction)  # once: its distances take most of the time
                measured = self._measured[sweep.shape].configs
                judged = {kernel: estimator.most_promising(kernel, JUDGED) for kernel in measured}
                for trust in surprise:  # the same configs for all
                    estimator.trust(trust)
                    surprise[trust] += _surprise(measured, judged, estimator)
        return min(surprise, key=lambda trust: surprise[trust]) if any(surprise.values()) else Trust()

    def case(self, sweep: _Scored, trust: Trust, others: Sequence[Measured]) -> Case:
        """Return what each rule takes for a sweep's shape, by others alone."""
        knowledge = self._knowledge(others)
        config, passed_over = self._choice(sweep, trust, knowledge)
        steps = climb_down(knowledge.winners, sweep.shape, self.device.limits)
        nearest = (step.config for step in steps if isinstance(step, Candidate))
        return Case(
            shape=sweep.shape,
            expected=_slowdown(sweep, config),
            nearest=_slowdown(sweep, _first_with_time(sweep, nearest)),
            default=_slowdown(sweep, _first_with_time(sweep, _defaults(sweep))),
            config=config,
            passed_over=passed_over,
        )

    def slowdown_by(self, shape: AttentionShape, correction: DeviceCorrection) -> float:
        """Return how much slower than the best of its sweep a shape's config is that another device's measurements
        speak for."""
        (sweep,) = (one for one in self.sweeps if one.shape == shape)
        return _slowdown(sweep, self._first_choice(sweep, correction, ())[0])

    def _others(self, shape: AttentionShape, without: Without) -> list[Measured]:
        if without is Without.SHAPE:
            return [one for one in self.recorded if one.shape != shape]
        return [one for one in self.recorded if family_of(one.shape) != family_of(shape)]

    def _knowledge(self, recorded: Sequence[Measured]) -> "_Knowledge":
        """Return what these shapes say: their measurements, and their winners."""
        shapes = {one.shape for one in recorded}
        return _Knowledge(tuple(promising(recorded)), ConfigTable(row for row in self._winners if row.shape in shapes))

    def _choice(self, sweep: _Scored, trust: Trust, knowledge: "_Knowledge") -> tuple[KernelConfig, int]:
        """Return the first choice that the sweep has a time of, and how many came before it."""
        correction = DeviceCorrection(device=self.device.key, trust=trust, measured=knowledge.measured)
        return self._first_choice(sweep, correction, knowledge.winners.neighbours(sweep.shape))

    def _first_choice(
        self, sweep: _Scored, correction: DeviceCorrection, near: Sequence[TunedConfig]
    ) -> tuple[KernelConfig, int]:
        untuned = Untuned(self.device, correction, self._predict, partial(_timed_kernels, sweep))
        choices = [one.config for one in untuned.choices(sweep.shape, near)]
        config = _first_with_time(sweep, (*choices, *_defaults(sweep)))
        return config, choices.index(config) if config in choices else len(choices)


@dataclass(frozen=True, slots=True)
class _Knowledge:
    """The measurements without those of some shapes."""

    measured: tuple[Measured, ...]
    winners: ConfigTable


def summary(cases: Sequence[Case], rule: str) -> dict[str, float | None]:
    """Return geometric mean, 95th percentile and worst of a rule's slowdowns, and the mean of decoding alone."""
    slowdowns = sorted(getattr(case, rule) for case in cases)
    decoding = [getattr(case, rule) for case in cases if family_of(case.shape) == "decoding"]
    return {
        "shapes": len(slowdowns),
        "mean": geometric_mean(slowdowns),
        "p95": slowdowns[math.ceil(0.95 * len(slowdowns)) - 1],
        "worst": slowdowns[-1],
        "decoding_shapes": len(decoding),
        "decoding": geometric_mean(decoding) if decoding else None,
    }


def _grid() -> Iterator[Trust]:
    """Yield the constants that are tried."""
    for values in itertools.product(*GRID.values()):
        trust = replace(Trust(), **dict(zip(GRID, values, strict=True)))
        yield replace(trust, prior=trust.doubt / 2)


def _surprise(
    measured: Mapping[str, Mapping[RelativeConfig, LogRatio]],
    judged: Mapping[str, Sequence[RelativeConfig]],
    estimator: Estimator,
) -> float:
    """Return the mean negative logarithm of the likelihood of what was measured for a shape, by guesses from others."""
    found = []
    for kernel, ratios in measured.items():
        for config in judged[kernel]:
            if config in ratios:
                guess, _ = estimator.config_over_default(kernel, config, ratios[config].predicted)
                off = min(ratios[config].measured, HIGHEST) - guess.mean
                found.append((math.log(guess.variance) + off**2 / guess.variance) / 2)
    return fmean(found) if found else 0.0


def _first_with_time(sweep: _Scored, configs: Iterable[KernelConfig]) -> KernelConfig:
    """Return the first of these that a sweep has a time of. A sweep is recorded from the defaults on."""
    return next(config for config in configs if config in sweep.scores)


def _timed_kernels(sweep: _Scored, shape: AttentionShape, limits: ComputeLimits) -> list[AttentionKernel]:
    """Return the kernels of a shape that a sweep has times of: it cannot judge a choice of later ones."""
    timed = {config.kernel for config in sweep.scores}
    return [kernel for kernel in kernels_for(shape, limits) if kernel.name in timed]


def _can_judge(sweep: _Scored, found: Measured | None) -> bool:
    """Return whether a sweep has a time of today's default of its first kernel: one that was recorded before that
    default cannot judge what calls get now."""
    return found is not None and found.first == _timed_kernels(sweep, sweep.shape, sweep.limits)[0].name


def _defaults(sweep: _Scored) -> Iterator[KernelConfig]:
    limits = sweep.limits
    yield from (kernel.default_config(sweep.shape, limits) for kernel in kernels_for(sweep.shape, limits))


def _slowdown(sweep: _Scored, config: KernelConfig) -> float:
    return sweep.scores[config] / min(sweep.scores.values())


def family_of(shape: AttentionShape) -> str:
    """Return which of `FAMILIES` a shape belongs to."""
    if shape.direction is Direction.BACKWARD:
        return "backward"
    if is_decoding(shape):
        return "decoding"
    return "forward, full" if shape.causal is Causal.NONE else "forward, causal"

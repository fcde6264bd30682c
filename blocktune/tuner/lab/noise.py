"""How noisy a GPU's times are: the protocol of a search, repeated on a few configs for minutes, the regimes in turns.

    study = study_noise({regime: runner, …}, configs, seconds=180)
    summary = summarize(study)      # tuner/lab/noise_report.py

What is repeated is what a search does, by the same runner: a candidate's measurement against the anchor, and finals. In
between a config meets itself in finals, which tells how often the noise alone would make a winner.
"""

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from blocktune.db.records.records import Outcome, Regime, Telemetry, Trial
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.tuner.measure.runner import Runner
from blocktune.tuner.search.finals import rank_trials
from blocktune.tuner.search.verdict import speedup

CONFIGS = 4
"""The config that is studied and those near it."""

TRIED = 8
"""At most this many configs are tried until `CONFIGS` of them run."""

BLOCK_SECONDS = 20.0
"""About so long a regime is kept up before it is the other one's turn."""


class StudyRunner(Runner, Protocol):
    """A runner in whose finals a config can meet itself."""

    def duel(self, config: KernelConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the rounds of both sides, in microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement of a candidate. at_seconds: since the study began. config: its place in the study."""

    regime: Regime
    at_seconds: float
    config: int
    time_us: float
    relative: float
    telemetry: Telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalTimes:
    """One run of finals: the medians of all configs in microseconds."""

    regime: Regime
    at_seconds: float
    times_us: tuple[float, ...]
    telemetry: Telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfDuel:
    """Finals of a config against itself: one side over the other. won: whether one of them would have won."""

    regime: Regime
    at_seconds: float
    ratio: float
    won: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study of repeated measurements. configs: the one that is studied, which is everybody's anchor, then those near
    it."""

    configs: tuple[KernelConfig, ...]
    seconds: float
    samples: tuple[Sample, ...]
    finals: tuple[FinalTimes, ...]
    duels: tuple[SelfDuel, ...]


def near_configs(
    config: KernelConfig, trials: Iterable[Trial], feasible: Iterable[KernelConfig]
) -> tuple[KernelConfig, ...]:
    """Return a config and those to study with it, the most interesting first.

    These are the fastest of earlier trials that have machine code of their own, then those of the same kernel that
    differ in the fewest parameters.
    """
    order, seen = rank_trials(trials), set[str]()
    for trial in order:
        if trial.config == config and trial.resources is not None:
            seen.add(trial.resources.code_sha256)
    fast = []
    for trial in order:
        code = trial.resources.code_sha256 if trial.resources is not None else ""
        if not code or code not in seen:
            fast.append(trial.config)
            seen.add(code)
    alike = sorted(
        (other for other in feasible if other.kernel == config.kernel), key=lambda other: _differing(config, other)
    )
    return tuple(dict.fromkeys((config, *fast, *alike)))[:TRIED]


def _differing(config: KernelConfig, other: KernelConfig) -> int:
    return sum(config.parameters[name] != value for name, value in other.parameters.items())


def study_noise(
    runners: Mapping[Regime, StudyRunner],
    configs: Sequence[KernelConfig],
    *,
    seconds: float,
    now: Callable[[], float] = time.monotonic,
    on_progress: Callable[[str], None] = lambda told: None,
) -> Study:
    """Repeat measurements and finals until the time is over; a measurement that would not end in time is not begun,
    but every regime has its turn and every turn its finals.

    Args:
        runners: of one shape, each under its regime.
        configs: what is studied, and others until `CONFIGS` of them run.
        seconds: wall time, the start of the runners and the compiling included.
        now: the time in seconds.
        on_progress: called with what comes next.

    Raises:
        NoFeasibleConfigError: the config that is studied does not run.
    """
    started = now()
    for runner in runners.values():
        runner.prepare()
    on_progress(f"compiling and trying {len(configs)} configs")
    study = _Study(runners, _running_configs(configs, runners.values()), now)
    left = seconds - (now() - started)
    turns = len(runners) * max(1, round(left / BLOCK_SECONDS / len(runners)))
    for turn in range(turns):
        regime = list(runners)[turn % len(runners)]
        on_progress(f"{turn + 1}/{turns} {regime}")
        study.take_turn(regime, until=started + seconds - left * (turns - turn - 1) / turns)
    return study.result(now() - started)


def _running_configs(configs: Sequence[KernelConfig], runners: Collection[Runner]) -> tuple[KernelConfig, ...]:
    """Return the first `CONFIGS` that run in all runners, where the very first becomes the anchor."""
    running: list[KernelConfig] = []
    for config in configs:
        if len(running) < CONFIGS and all(runner.measure(config).outcome is Outcome.OK for runner in runners):
            running.append(config)
        if not running:
            raise NoFeasibleConfigError(
                f"{config.label} does not run, so its noise cannot be measured. Tune the shape again by `tune run`."
            )
    return tuple(running)


class _Study:
    """A study as it is made."""

    def __init__(
        self, runners: Mapping[Regime, StudyRunner], configs: tuple[KernelConfig, ...], now: Callable[[], float]
    ) -> None:
        self._runners = runners
        self._configs = configs
        self._now = now
        self._began = now()
        self._samples: list[Sample] = []
        self._finals: list[FinalTimes] = []
        self._duels: list[SelfDuel] = []

    def take_turn(self, regime: Regime, until: float) -> None:
        """Time finals of all, then laps: everybody once as a candidate, then one against itself."""
        self._hold_finals(regime)
        steps = [partial(self._measure, regime, index) for index in range(len(self._configs))]
        steps.append(partial(self._duel, regime))
        took = [0.0] * len(steps)
        number = 0
        while self._now() + took[number] < until:
            begun = self._now()
            steps[number]()
            took[number] = self._now() - begun
            number = (number + 1) % len(steps)

    def result(self, seconds: float) -> Study:
        return Study(
            configs=self._configs,
            seconds=seconds,
            samples=tuple(self._samples),
            finals=tuple(self._finals),
            duels=tuple(self._duels),
        )

    def _elapsed_seconds(self) -> float:
        return self._now() - self._began

    def _measure(self, regime: Regime, index: int) -> None:
        found = self._runners[regime].measure(self._configs[index])
        if found.time_us is None or found.relative_to_anchor is None:
            return  # a worker that was lost is replaced; one measurement less
        self._samples.append(
            Sample(
                regime=regime,
                at_seconds=self._elapsed_seconds(),
                config=index,
                time_us=found.time_us,
                relative=found.relative_to_anchor,
                telemetry=found.telemetry,
            )
        )

    def _hold_finals(self, regime: Regime) -> None:
        found = self._runners[regime].finals(self._configs)
        if found.samples_us.keys() >= set(self._configs):
            times_us = tuple(statistics.median(found.samples_us[config]) for config in self._configs)
            self._finals.append(
                FinalTimes(
                    regime=regime, at_seconds=self._elapsed_seconds(), times_us=times_us, telemetry=found.telemetry
                )
            )

    def _duel(self, regime: Regime) -> None:
        one, other = self._runners[regime].duel(self._configs[0])
        gain = speedup(one, other)
        won = gain.beyond_noise or speedup(other, one).beyond_noise
        self._duels.append(SelfDuel(regime=regime, at_seconds=self._elapsed_seconds(), ratio=gain.median, won=won))

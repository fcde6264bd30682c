"""The finals: the best of the search, what calls get untuned, the default and the paper's rule, timed in turns and
measured for energy; the winner is checked again."""

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blocktune.db.records.records import Objective, Outcome, Trial
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoFeasibleConfigError, UsageError
from blocktune.tuner.candidates.starting_configs import Contenders
from blocktune.tuner.compile.answers import MAKE_ROOM
from blocktune.tuner.measure.measurement import Energies, Finals, Measurement
from blocktune.tuner.measure.protocol import LEAST_SETTLED_ROUNDS
from blocktune.tuner.measure.runner import Runner
from blocktune.tuner.search.verdict import Speedup, Verdict, decide, speedup

MAX_CHALLENGERS = 6
CHALLENGER_BAND = 1.08
"""Configs this close to the fastest in the search may still be the fastest under sustained load."""

MOST_FRUGAL = 3
"""Finalists that meet again, apart from those that are kept anyway."""

ENERGY_ROUNDS = LEAST_SETTLED_ROUNDS
"""As few as can settle anything: a burst takes half a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The verdict, the times in microseconds that it rests on (medians), the finalists that failed on the way, what
    disturbed the finals, and the energies that were measured in them.

    gain: the winner's speed-up over the default, whatever the objective; None when the default was not in the finals.
    """

    verdict: Verdict
    times_us: Mapping[KernelConfig, float]
    failures: Mapping[KernelConfig, Measurement]
    gain: Speedup | None = None
    disturbance: str = ""
    energies: Energies = field(default_factory=Energies)
    objective: Objective = Objective.TIME

    def columns(self, default: KernelConfig, paper: KernelConfig | None) -> dict[str, Any]:
        """Return what a `Best` keeps of the finals, by its fields."""
        winner, gain, energies = self.verdict.winner, self.gain, self.energies
        return {
            "time_us": self.times_us[winner],
            "default_time_us": self.times_us.get(default),
            "paper_time_us": None if paper is None else self.times_us.get(paper),
            "speedup_over_default": gain.median if gain else None,
            "speedup_low": gain.low if gain else None,
            "speedup_high": gain.high if gain else None,
            "energy_mj": energies.energy_mj(winner),
            "default_energy_mj": energies.energy_mj(default),
            "paper_energy_mj": energies.energy_mj(paper),
            "objective": str(self.objective),
        }

    def with_energy(self, trial: Trial) -> Trial:
        """Return the trial of a finalist with its energy and the power of its bursts, as far as they were measured."""
        energy_mj, power_w = self.energies.energy_mj(trial.config), self.energies.power_w(trial.config)
        if energy_mj is None or power_w is None:
            return trial
        return replace(trial, energy_mj=energy_mj, telemetry=replace(trial.telemetry, power_w=round(power_w, 1)))


def ranked(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials with a time, fastest first, by what cancels drift."""
    timed = [trial for trial in trials if trial.outcome is Outcome.OK]
    return sorted(timed, key=lambda trial: (trial.relative_to_anchor or 0.0, trial.time_us or 0.0))


def finalists(trials: Iterable[Trial], contenders: Contenders, incumbent: KernelConfig | None) -> list[KernelConfig]:
    """Return who takes part: what calls get untuned, the default, the paper's rule, the stored winner and the fastest
    of the search, if they run."""
    order = ranked(trials)
    timed = {trial.config for trial in order}
    best = order[0].relative_to_anchor or 1.0
    close = [trial.config for trial in order if (trial.relative_to_anchor or 1.0) <= CHALLENGER_BAND * best]
    named = [contenders.untuned, contenders.default, contenders.paper, incumbent]
    chosen = [config for config in named if config in timed] + close[:MAX_CHALLENGERS]
    return list(dict.fromkeys(config for config in chosen if config is not None))


def hold_finals(
    runner: Runner,
    trials: Sequence[Trial],
    contenders: Contenders,
    incumbent: KernelConfig | None,
    objective: Objective = Objective.TIME,
) -> Result:
    """Time the finalists, measure energies, and confirm the winner; if it fails, the next best takes its place.

    By energy, all finalists have it measured; by time, the winner, the default and the paper's rule.

    Raises:
        NoFeasibleConfigError: none of them passes.
        UsageError: the winner is the one of least energy, and the GPU does not report it.
    """
    finals = runner.finals(finalists(trials, contenders, incumbent))
    failures, default = dict(finals.failures), contenders.default
    energies, scores = _scores(runner, finals, default, objective)
    while scores:
        verdict = decide(scores, default, contenders.space.feasible, objective)
        winner = verdict.winner
        confirmed = runner.confirm(winner)
        if confirmed.outcome is Outcome.OK:
            samples = {config: rounds for config, rounds in finals.samples_us.items() if config not in failures}
            if objective is Objective.TIME:
                shown = [config for config in (winner, default, contenders.paper) if config in samples]
                energies = runner.energies(list(dict.fromkeys(shown)), 1)
            return Result(
                verdict=verdict,
                times_us={config: statistics.median(rounds) for config, rounds in samples.items()},
                failures=failures,
                gain=speedup(samples[default], samples[winner]) if default in samples else None,
                disturbance=finals.disturbance or _of_bursts(energies),
                energies=energies,
                objective=objective,
            )
        failures[winner] = confirmed
        del scores[winner]
    return _without_finals(runner, trials, contenders, failures)


def _scores(
    runner: Runner, finals: Finals, default: KernelConfig, objective: Objective
) -> tuple[Energies, dict[KernelConfig, Sequence[float]]]:
    """Return the energies that decide, and the rounds of what the objective compares.

    Raises:
        UsageError: energies decide, and there are none.
    """
    if objective is Objective.TIME or not finals.samples_us:
        return Energies(), dict(finals.samples_us)
    energies = frugal_energies(runner, list(finals.samples_us), [default])
    if not energies.bursts:
        raise UsageError(
            "The energy of no finalist could be measured: finals by energy need a GPU that reports its energy by NVML. "
            "Use `--objective time`; all trials are kept."
        )
    return energies, {config: [burst.energy_mj for burst in rounds] for config, rounds in energies.bursts.items()}


def _of_bursts(energies: Energies) -> str:
    return f"followed by bursts that were disturbed, since {energies.disturbance}" if energies.disturbance else ""


def require_result(trials: Sequence[Trial], label: str, stopped_by_machine: Collection[KernelConfig]) -> None:
    """Check that a search of the problem with this label has found anything.

    Raises:
        NoFeasibleConfigError: no config was timed or predicted; the message says how they ended, or what the machine
            lacks.
    """
    if any(trial.outcome in (Outcome.OK, Outcome.PREDICTED) for trial in trials):
        return
    stopped = [trial for trial in trials if trial.config in stopped_by_machine]
    if stopped:
        raise NoFeasibleConfigError(
            f"No config of {label} was tried to its end: {len(stopped)} of {len(trials)} failed by this machine, "
            f"for example {stopped[0].config.label}: {stopped[0].error.rstrip('.')}. "
            f"{MAKE_ROOM}, and run the command again; attention falls back to PyTorch meanwhile."
        )
    counts = Counter(trial.outcome for trial in trials).most_common()
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts)
    example = next(trial for trial in trials if trial.outcome is counts[0][0])
    raise NoFeasibleConfigError(
        f"No config works for {label}: of {len(trials)} tried, {told}. "
        f"For example {example.config.label}: {example.error.rstrip('.')}. "
        "Try other kernels or a larger budget; attention falls back to PyTorch meanwhile."
    )


def screening_verdict(trials: Iterable[Trial], default: KernelConfig, why: str) -> Result:
    """Return the verdict when there are no finals: the default if it runs, since nothing was shown to be faster."""
    times = {trial.config: trial.time_us or 0.0 for trial in ranked(trials)}
    winner = default if default in times else next(iter(times))
    reason = f"{why}; {'the default stays' if winner == default else 'the default does not run here'}"
    return Result(verdict=Verdict(winner=winner, reason=reason, speedup=None), times_us=times, failures={})


def interrupted_verdict(trials: Iterable[Trial], default: KernelConfig) -> Result:
    """Return the best so far, by the search's own rounds against the anchor; its speed-up is not established."""
    order = ranked(trials)
    times = {trial.config: trial.time_us or 0.0 for trial in order}
    reason = "interrupted before the finals: the fastest so far"
    return Result(verdict=Verdict(winner=order[0].config, reason=reason, speedup=None), times_us=times, failures={})


def _without_finals(
    runner: Runner, trials: Sequence[Trial], contenders: Contenders, failures: Mapping[KernelConfig, Measurement]
) -> Result:
    """Return the first config that is confirmed, the default before all others."""
    failed = dict(failures)
    remaining = [trial for trial in ranked(trials) if trial.config not in failed]
    while remaining:
        result = screening_verdict(remaining, contenders.default, "the finalists could not be timed together")
        confirmed = runner.confirm(result.verdict.winner)
        if confirmed.outcome is Outcome.OK:
            return Result(verdict=result.verdict, times_us=result.times_us, failures=failed)
        failed[result.verdict.winner] = confirmed
        remaining = [trial for trial in remaining if trial.config not in failed]
    errors = "; ".join(f"{config.label}: {failure.error}" for config, failure in list(failed.items())[:3])
    raise NoFeasibleConfigError(
        f"Every finalist failed, so that there is no winner: {errors}. "
        "Report this with `tune doctor --json`; attention falls back to PyTorch meanwhile."
    )


def frugal_energies(
    runner: Runner, finalists: Sequence[KernelConfig], kept: Sequence[KernelConfig], most: int = MOST_FRUGAL
) -> Energies:
    """Return rounds of bursts of the `kept` finalists and the `most` that took the least energy in a burst of each."""
    first = runner.energies(finalists, 1)
    order = sorted(first.bursts, key=lambda config: first.bursts[config][0].energy_mj)
    chosen = list(dict.fromkeys((*(config for config in kept if config in first.bursts), *order[:most])))
    return runner.energies(chosen, ENERGY_ROUNDS) if chosen else first

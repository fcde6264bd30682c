"""The finals: the best of the search, what calls get untuned, the default and FA's heuristic, timed in turns and
measured for energy; the winner is checked again."""

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic

from blocktune.db.records.records import AnyTrial, ConfigT, Objective, Outcome, ProblemT
from blocktune.kernels.values.errors import NoFeasibleConfigError, UsageError
from blocktune.tuner.compile.answers import MAKE_ROOM
from blocktune.tuner.measure.measurement import Energies, Finals, Measurement
from blocktune.tuner.measure.protocol import LEAST_SETTLED_ROUNDS
from blocktune.tuner.measure.runner import Runner
from blocktune.tuner.search.verdict import Speedup, Verdict, decide, speedup
from blocktune.tuner.subject.subject import Subject

MAX_CHALLENGERS = 6
CHALLENGER_BAND = 1.08
"""Configs this close to the fastest in the search may still be the fastest under sustained load."""

MOST_FRUGAL = 3
"""Finalists that meet again, apart from those that are kept anyway."""

ENERGY_ROUNDS = LEAST_SETTLED_ROUNDS
"""As few as can settle anything: a burst takes half a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Generic[ConfigT]):
    """The verdict, the times in microseconds that it rests on (medians), the finalists that failed on the way, what
    disturbed the finals, and the energies that were measured in them.

    gain: the winner's speed-up over the default, whatever the objective; None when the default was not in the finals.
    """

    verdict: Verdict[ConfigT]
    times_us: Mapping[ConfigT, float]
    failures: Mapping[ConfigT, Measurement]
    gain: Speedup | None = None
    disturbance: str = ""
    energies: Energies[ConfigT] = field(default_factory=Energies)
    objective: Objective = Objective.TIME

    def columns(self, default: ConfigT, paper: ConfigT | None) -> dict[str, Any]:
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

    def with_energy(self, trial: AnyTrial) -> AnyTrial:
        """Return the trial of a finalist with its energy and the power of its bursts, as far as they were measured."""
        energy_mj, power_w = self.energies.energy_mj(trial.config), self.energies.power_w(trial.config)
        if energy_mj is None or power_w is None:
            return trial
        return replace(trial, energy_mj=energy_mj, telemetry=replace(trial.telemetry, power_w=round(power_w, 1)))


def rank_trials(trials: Iterable[AnyTrial]) -> list[AnyTrial]:
    """Return the trials with a time, fastest first, by what cancels drift."""
    timed = [trial for trial in trials if trial.outcome is Outcome.OK]
    return sorted(timed, key=lambda trial: (trial.relative_to_anchor or 0.0, trial.time_us or 0.0))


def finalists(
    trials: Iterable[AnyTrial], subject: Subject[ProblemT, ConfigT], incumbent: ConfigT | None
) -> list[ConfigT]:
    """Return who takes part: what calls get untuned, the default, FA's heuristic, the stored winner and the fastest
    of the search, if they run. Of configs that launch equal code in the same way the search's first one stands for
    all."""
    order, contenders = rank_trials(trials), subject.contenders
    timed = {trial.config for trial in order}
    best = order[0].relative_to_anchor or 1.0
    close = [
        trial.config
        for place, trial in enumerate(order)
        if (trial.relative_to_anchor or 1.0) <= CHALLENGER_BAND * best
        and not any(
            subject.are_twins(trial.config, trial.resources, other.config, other.resources) for other in order[:place]
        )
    ]
    named = [contenders.untuned, contenders.default, contenders.paper, incumbent]
    chosen = [config for config in named if config in timed] + close[:MAX_CHALLENGERS]
    return list(dict.fromkeys(config for config in chosen if config is not None))


def hold_finals(
    runner: Runner[ConfigT],
    trials: Sequence[AnyTrial],
    subject: Subject[ProblemT, ConfigT],
    incumbent: ConfigT | None,
    objective: Objective = Objective.TIME,
) -> Result[ConfigT]:
    """Time the finalists, measure energies, and confirm the winner; if it fails, the next best takes its place.

    By energy, all finalists have it measured; by time, the winner, the default and FlashAttention's heuristic.

    Raises:
        NoFeasibleConfigError: none of them passes.
        UsageError: the winner is the one of least energy, and the GPU does not report it.
    """
    contenders = subject.contenders
    finals = runner.finals(finalists(trials, subject, incumbent))
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
    return _skip_finals(runner, trials, subject, failures)


def _scores(
    runner: Runner[ConfigT], finals: Finals[ConfigT], default: ConfigT, objective: Objective
) -> tuple[Energies[ConfigT], dict[ConfigT, Sequence[float]]]:
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


def _of_bursts(energies: Energies[Any]) -> str:
    return f"followed by bursts that were disturbed, since {energies.disturbance}" if energies.disturbance else ""


def require_result(
    trials: Sequence[AnyTrial], subject: Subject[ProblemT, ConfigT], stopped_by_machine: Collection[ConfigT]
) -> None:
    """Check that a search has found anything.

    Raises:
        NoFeasibleConfigError: no config was timed or predicted; the message says how they ended, or what the machine
            lacks.
    """
    if any(trial.outcome in (Outcome.OK, Outcome.PREDICTED) for trial in trials):
        return
    if not trials:
        raise NoFeasibleConfigError(
            f"Nothing of {subject.label} was tried: the study knows every config, but the database has no trial of "
            f"them. Name another --study, or the database of its trials; {subject.meanwhile}."
        )
    stopped = [trial for trial in trials if trial.config in stopped_by_machine]
    if stopped:
        raise NoFeasibleConfigError(
            f"No config of {subject.label} was tried to its end: {len(stopped)} of {len(trials)} failed by this "
            f"machine, for example {stopped[0].config.label}: {stopped[0].error.rstrip('.')}. "
            f"{MAKE_ROOM}, and run the command again; {subject.meanwhile}."
        )
    counts = Counter(trial.outcome for trial in trials).most_common()
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts)
    example = next(trial for trial in trials if trial.outcome is counts[0][0])
    raise NoFeasibleConfigError(
        f"No config works for {subject.label}: of {len(trials)} tried, {told}. "
        f"For example {example.config.label}: {example.error.rstrip('.')}. "
        f"Try other kernels or a larger budget; {subject.meanwhile}."
    )


def screening_verdict(trials: Iterable[AnyTrial], default: ConfigT, why: str) -> Result[ConfigT]:
    """Return the verdict when there are no finals: the default if it runs, since nothing was shown to be faster."""
    times = {trial.config: trial.time_us or 0.0 for trial in rank_trials(trials)}
    winner = default if default in times else next(iter(times))
    reason = f"{why}; {'the default stays' if winner == default else 'the default does not run here'}"
    return Result(verdict=Verdict(winner=winner, reason=reason, speedup=None), times_us=times, failures={})


def interrupted_verdict(trials: Iterable[AnyTrial], default: ConfigT) -> Result[ConfigT]:
    """Return the best so far, by the search's own rounds against the anchor; its speed-up is not established."""
    order = rank_trials(trials)
    times = {trial.config: trial.time_us or 0.0 for trial in order}
    reason = "interrupted before the finals: the fastest so far"
    return Result(verdict=Verdict(winner=order[0].config, reason=reason, speedup=None), times_us=times, failures={})


def _skip_finals(
    runner: Runner[ConfigT],
    trials: Sequence[AnyTrial],
    subject: Subject[ProblemT, ConfigT],
    failures: Mapping[ConfigT, Measurement],
) -> Result[ConfigT]:
    """Return the first config that is confirmed, the default before all others."""
    failed = dict(failures)
    remaining = [trial for trial in rank_trials(trials) if trial.config not in failed]
    while remaining:
        result = screening_verdict(remaining, subject.contenders.default, "the finalists could not be timed together")
        confirmed = runner.confirm(result.verdict.winner)
        if confirmed.outcome is Outcome.OK:
            return Result(verdict=result.verdict, times_us=result.times_us, failures=failed)
        failed[result.verdict.winner] = confirmed
        remaining = [trial for trial in remaining if trial.config not in failed]
    errors = "; ".join(f"{config.label}: {failure.error}" for config, failure in list(failed.items())[:3])
    raise NoFeasibleConfigError(
        f"Every finalist failed, so that there is no winner: {errors}. "
        f"Report this with `tune doctor --json`; {subject.meanwhile}."
    )


def frugal_energies(
    runner: Runner[ConfigT], finalists: Sequence[ConfigT], kept: Sequence[ConfigT], most: int = MOST_FRUGAL
) -> Energies[ConfigT]:
    """Return rounds of bursts of the `kept` finalists and the `most` that took the least energy in a burst of each."""
    first = runner.energies(finalists, 1)
    order = sorted(first.bursts, key=lambda config: first.bursts[config][0].energy_mj)
    chosen = list(dict.fromkeys((*(config for config in kept if config in first.bursts), *order[:most])))
    return runner.energies(chosen, ENERGY_ROUNDS) if chosen else first

"""Savings and losses in a race among candidates, by the rounds that sweeps recorded."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from blocktune.db.records.records import Trial
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.measure.protocol import RACE_MARGIN, RACE_ROUNDS, is_behind

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.trial import FrozenTrial

RACING_MARGINS = (1.05, 1.1, RACE_MARGIN, 1.25)
"""How much slower than the best a config must be in its first rounds to get no more of them."""

WILCOXON_LEVEL = 0.1
"""Error probability at which Optuna's WilcoxonPruner stops a trial by default."""

CLOSE = 0.02
"""A config this close to the best must not be stopped."""

Race = Callable[[Trial], Callable[[Trial], int]]
"""Against the best of a sweep: how many of its recorded rounds a trial gets."""


def racing_rows(sweeps: Sequence[Sweep]) -> list[dict[str, Any]]:
    """Return one row for each rule; that of Optuna's pruner where scipy is installed, which takes minutes."""
    rows = [racing_row(sweeps, margin) for margin in RACING_MARGINS]
    return [*rows, wilcoxon_row(sweeps)] if find_spec("scipy") else rows


def racing_row(sweeps: Iterable[Sweep], margin: float) -> dict[str, Any]:
    """Return what our race would do: a config whose first rounds are slower than the best's median by the margin gets
    no further ones; see `_row`."""

    def against(best: Trial) -> Callable[[Trial], int]:
        best_us = float(np.median(best.samples_us))

        def rounds(trial: Trial) -> int:
            behind = is_behind(float(np.median(trial.samples_us[:RACE_ROUNDS])), best_us, margin)
            return min(RACE_ROUNDS, len(trial.samples_us)) if behind else len(trial.samples_us)

        return rounds

    return {"margin": margin} | _row(sweeps, against)


def wilcoxon_row(sweeps: Iterable[Sweep], level: float = WILCOXON_LEVEL) -> dict[str, Any]:
    """Return what Optuna's WilcoxonPruner would do, which tests after every round whether the rounds so far are slower
    than the best's of equal number; see `_row`. It needs scipy."""
    from optuna.exceptions import ExperimentalWarning
    from optuna.pruners import WilcoxonPruner

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        pruner = WilcoxonPruner(p_threshold=level)
    return {"pruner": f"WilcoxonPruner, p {level:g}"} | _row(sweeps, lambda best: _pruning_rule(pruner, best))


def _row(sweeps: Iterable[Sweep], race: Race) -> dict[str, Any]:
    """Return the row of one rule. rounds_saved: the share of all recorded rounds that are not timed. close: configs
    within `CLOSE` of the best of their sweep; stopped_close: how many of these are stopped."""
    rounds = saved = close = stopped_close = 0
    for sweep in sweeps:
        scores, timed = sweep.scores, [trial for trial in sweep.timed.values() if trial.samples_us]
        if not timed:
            continue
        given_to = race(min(timed, key=lambda trial: float(np.median(trial.samples_us))))
        nearly = (1 + CLOSE) * min(scores.values())
        for trial in timed:
            given, recorded, is_close = given_to(trial), len(trial.samples_us), scores[trial.config] <= nearly
            rounds += recorded
            saved += recorded - given
            close += is_close
            stopped_close += is_close and given < recorded
    return {"rounds_saved": saved / rounds if rounds else 0.0, "close": close, "stopped_close": stopped_close}


def _pruning_rule(pruner: "BasePruner", best: Trial) -> Callable[[Trial], int]:
    """Return the rounds until a pruner stops a trial, which reports them one after the other."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    study.add_trial(_reported_trial(best.samples_us))

    def rounds(trial: Trial) -> int:
        common = trial.samples_us[: len(best.samples_us)] if trial is not best else ()
        counts = range(1, len(common) + 1)
        stops = (count for count in counts if pruner.prune(study, _reported_trial(common[:count])))
        return next(stops, len(trial.samples_us))

    return rounds


def _reported_trial(samples_us: Sequence[float]) -> "FrozenTrial":
    """Return a trial of a study after these rounds."""
    from optuna.trial import create_trial

    return create_trial(value=float(np.median(samples_us)), intermediate_values=dict(enumerate(samples_us)))

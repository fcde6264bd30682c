"""The race of candidates as an Optuna pruner: `RacePruner`."""

from optuna.pruners import BasePruner
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial

from blocktune.tuner.measure.protocol import RACE_MARGIN, RACE_ROUNDS, is_behind


class RacePruner(BasePruner):
    """Stops a trial that is clearly slower than the best so far once it has reported its first rounds.

    Intermediate values are medians of the rounds so far, and positive. It decides once: a trial that goes on is not
    stopped later, so that the ones that are nearly as good as the best are all known equally well.

    Args:
        rounds: reported values after which it decides.
        margin: how many times slower than the best trial of the study a trial is stopped.
    """

    def __init__(self, rounds: int = RACE_ROUNDS, margin: float = RACE_MARGIN) -> None:
        self._rounds, self._margin = rounds, margin

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        reported = trial.intermediate_values
        if len(reported) != self._rounds:
            return False
        try:
            best = study.best_value
        except ValueError:
            return False  # nothing is complete yet
        value = reported[max(reported)]
        if study.direction == StudyDirection.MAXIMIZE:
            value, best = best, value
        return is_behind(value, best, self._margin)

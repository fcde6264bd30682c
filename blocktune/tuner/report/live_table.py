"""The table of a sweep that is still measured: new trials change rows of it, and nothing is computed twice."""

from collections.abc import Sequence
from typing import Any

from blocktune.db.records.records import Trial
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.report.importance import parameter_importance
from blocktune.tuner.report.on_chip_table import on_chip_table
from blocktune.tuner.report.sweep_table import explanation, sweep_table
from blocktune.tuner.report.trial_columns import in_order, trial_columns

Update = dict[str, Any]
"""What a page does to its copy of the table: `rows` says which rows get the values of `columns`, `scores` is that whole
column, and `facts` replaces what stands next to the columns."""

GROWTH = 1.25
"""By how much a sweep grows before its parameters are judged again."""


class LiveTable:
    """The table of `sweep_table`, kept up to date.

    Attributes:
        table: as it is now.
    """

    def __init__(self, sweep: Sweep) -> None:
        self.table = sweep_table(sweep)
        self._rows = {trial.config: row for row, trial in enumerate(in_order(sweep.trials))}
        self._judged = len(sweep.trials)

    def update(self, sweep: Sweep, trials: Sequence[Trial]) -> Update:
        """Put trials into the table and return what changed.

        Args:
            sweep: as it is now, with these trials.
            trials: those that are new, or were made again.
        """
        found = in_order(trials)
        rows = [self._row(trial.config) for trial in found]
        columns = trial_columns(sweep, found) | {"layout": self._layouts(sweep, found)}
        scores = sweep.scores
        update = {
            "rows": rows,
            "columns": columns,
            "scores": [scores.get(config) for config in self._rows],
            "facts": {
                "layouts": self.table["layouts"],
                "measured_on": max(trial.created_at for trial in sweep.trials).date().isoformat(),
                "importance": self._importance(sweep),
                "explanation": explanation(sweep),
            },
        }
        apply_update(self.table, update)
        return update

    def _importance(self, sweep: Sweep) -> list[dict[str, Any]]:
        """Return which parameters matter, judged again when there are a quarter more trials: it takes a moment."""
        if len(sweep.trials) < GROWTH * self._judged:
            return list(self.table["importance"])
        self._judged = len(sweep.trials)
        return parameter_importance(sweep)

    def _row(self, config: KernelConfig) -> int:
        return self._rows.setdefault(config, len(self._rows))

    def _layouts(self, sweep: Sweep, trials: Sequence[Trial]) -> list[int | None]:
        """Return the number of each trial's layout among those of the table, which gets the new ones."""
        layouts, numbers = on_chip_table(sweep, [trial.config for trial in trials])
        known = self.table["layouts"]
        known += [layout for layout in layouts if layout not in known]
        return [None if number is None else known.index(layouts[number]) for number in numbers]


def apply_update(table: dict[str, Any], update: Update) -> None:
    """Change the rows of a table as an update says."""
    for name, column in table["columns"].items():
        for row, value in zip(update["rows"], update["columns"][name], strict=True):
            if row == len(column):
                column.append(value)
            else:
                column[row] = value
    table["columns"]["score"] = update["scores"]
    table.update(update["facts"])

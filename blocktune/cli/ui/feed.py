"""One sweep that pages follow: its table, and what has changed in it."""

from datetime import UTC, datetime, timedelta
from typing import Any

from blocktune.cli.report.page import json_text
from blocktune.cli.report.shape_views import winner_view
from blocktune.cli.ui.event_log import EventLog
from blocktune.db.records.records import Best, Outcome, Trial
from blocktune.db.store import ResultStore
from blocktune.db.tail import Mark, StoreTail, TrialGroup
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.lab.sweep_file import Sweep, sweeps_of
from blocktune.tuner.report.live_table import LiveTable
from blocktune.tuner.report.sweep_table import sweep_table

QUIET = timedelta(minutes=2)
"""Without a trial for longer than this a search counts as ended: a compile takes up to a minute."""


class Feed:
    """The trials of one group as a table that grows.

    Attributes:
        log: what changed; its number is that of the table.
    """

    def __init__(self, group: TrialGroup) -> None:
        self.group = group
        self.log = EventLog()
        self._mark = Mark()
        self._trials: dict[tuple[str, str, KernelConfig], Trial] = {}
        self._sweep: Sweep | None = None
        self._live: LiveTable | None = None
        self._status: dict[str, Any] = {}

    def read(self, tail: StoreTail, store: ResultStore) -> None:
        """Take in what the database has more than at the last time.

        Raises:
            StoreError: it does not answer.
        """
        new, self._mark = tail.trials(self.group, self._mark)
        fresh = {_key(trial): trial for trial in new}
        changed = [trial for key, trial in fresh.items() if self._trials.get(key) != trial]
        if changed:
            self._trials |= fresh
            self._show(changed)
        self._say(store.best(self.group.device, self.group.shape))

    def table_text(self) -> str:
        """Return what a page begins with, as JSON."""
        table = None if self._live is None else self._live.table
        return json_text({"number": self.log.number, "status": self._status, "table": table})

    def _show(self, changed: list[Trial]) -> None:
        """Put trials into the table. Those of another software begin another one."""
        before, sweeps = self._sweep, sweeps_of(self._trials.values())
        if not sweeps:  # predictions alone
            return
        self._sweep = sweeps[0]
        kept = set(self._sweep.trials)
        if self._live is not None and before is not None and _continues(before, self._sweep):
            shown = [trial for trial in changed if trial in kept]
            if shown:
                self.log.add("rows", self._live.update(self._sweep, shown))
            return
        self._live = LiveTable(self._sweep)
        self.log.forget()
        self.log.add("table", {})

    def _say(self, best: Best | None) -> None:
        """Say how the search stands, where that has changed."""
        status = search_status(list(self._trials.values()), best, datetime.now(UTC))
        if status != self._status:
            self._status = status
            self.log.add("status", status)


class FixedFeed:
    """A sweep of a file, which does not change."""

    def __init__(self, sweep: Sweep) -> None:
        self.log = EventLog()
        self._sweep = sweep

    def table_text(self) -> str:
        """Return what a page begins with, as JSON."""
        status = {"state": "recorded", "trials": len(self._sweep.trials), "last_at": None, "winner": None}
        return json_text({"number": 0, "status": status, "table": sweep_table(self._sweep)})


def search_status(trials: list[Trial], best: Best | None, now: datetime) -> dict[str, Any]:
    """Return how the search of a group stands: `finished` with a winner that is younger than its trials, `running`
    while trials arrive, `predicted` where nothing was measured, else `stopped`."""
    last_at = max((trial.created_at for trial in trials), default=None)
    if all(trial.outcome is Outcome.PREDICTED for trial in trials):
        state = "predicted"
    elif best is not None and (last_at is None or best.created_at >= last_at):
        state = "finished"
    else:
        state = "running" if last_at is not None and now - last_at <= QUIET else "stopped"
    return {
        "state": state,
        "trials": len(trials),
        "last_at": None if last_at is None else last_at.isoformat(timespec="seconds"),
        "winner": None if best is None else winner_view(best),
    }


def _key(trial: Trial) -> tuple[str, str, KernelConfig]:
    """Return what tells the trials of a group apart."""
    return trial.environment.digest, trial.kernel_hash, trial.config


def _continues(before: Sweep, now: Sweep) -> bool:
    """Return whether a sweep has the configs of the one before, by the same software, and maybe more."""
    configs = {trial.config for trial in now.trials}
    return before.environment == now.environment and all(trial.config in configs for trial in before.trials)

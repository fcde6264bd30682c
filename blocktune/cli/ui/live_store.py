"""The database as all pages see it: read in one place, however many pages follow it, and in trouble at times."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from blocktune.cli.ui.event_log import EventLog
from blocktune.cli.ui.feed import Feed, FixedFeed
from blocktune.db.records.records import Best
from blocktune.db.store import ResultStore
from blocktune.db.tables.location import StoreTarget
from blocktune.db.tail import LOCK_TIMEOUT_SECONDS, StoreTail, TrialGroup
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import BlocktuneError, StoreError, UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.lab.sweep_file import Sweep

MAX_FEEDS = 16
"""Sweeps that are kept in memory; the one that was not read for longest goes first."""

MAX_LISTED = 500
"""Sweeps of the database that a page lists, the youngest; a form finds the others."""

logger = logging.getLogger("blocktune")


class LiveStore:
    """Follows a database by a high-water mark. Any thread may call it.

    Attributes:
        log: of what concerns every page: new sweeps, and whether the database answers.
        problem: why it does not answer; empty where it does.
    """

    def __init__(self, target: StoreTarget, sweeps: Sequence[Sweep] = ()) -> None:
        self.log = EventLog()
        self.problem = ""
        self._target = target
        self._fixed = {f"file-{number}": FixedFeed(sweep) for number, sweep in enumerate(sweeps)}
        self._sweeps = tuple(sweeps)
        self._lock = threading.Lock()
        self._opened: tuple[StoreTail, ResultStore] | None = None
        self._groups: dict[str, TrialGroup] = {}
        self._winners: tuple[Any, list[Best]] = (None, [])
        self._feeds: OrderedDict[str, Feed] = OrderedDict()

    def refresh(self, followed: Sequence[str] = ()) -> None:
        """Read what is new: groups, and trials of the sweeps that are followed. What goes wrong becomes the problem."""
        with self._lock:
            try:
                tail, store = self._open()
                self._find_groups(tail)
                for name in followed:
                    if name in self._feeds:
                        self._feeds[name].read(tail, store)
            except BlocktuneError as error:
                self._close()
                self._set_problem(str(error))
            else:
                self._set_problem("")

    def winners(self) -> tuple[Any, list[Best]]:
        """Return the winners of the database, and a mark that differs once they do; none where it does not answer."""
        with self._lock:
            try:
                tail, store = self._open()
                mark = tail.winners_mark()
                if mark != self._winners[0]:
                    self._winners = mark, store.bests()
            except BlocktuneError as error:
                self._close()
                self._set_problem(str(error))
                return None, []
            return self._winners

    def overview(self) -> dict[str, Any]:
        """Return what a page lists: the sweeps, the youngest of the database first and then those of files, the number
        of the event up to which this is so, and the problem."""
        number, problem = self.log.number, self.problem
        with self._lock:
            groups = sorted(self._groups.values(), key=lambda group: group.last_id, reverse=True)
        listed = [_headline(group) for group in groups[:MAX_LISTED]]
        files = [
            {"id": name, "label": sweep.label, "shape_label": sweep.shape.label, "device": sweep.device.name}
            for name, sweep in zip(self._fixed, self._sweeps, strict=True)
        ]
        return {"number": number, "problem": problem, "sweeps": [*listed, *files]}

    def table_text(self, name: str) -> str:
        """Return the table of a sweep as JSON, as it is now.

        Raises:
            UsageError: there is no sweep of this name.
            StoreError: the database does not answer.
        """
        if name in self._fixed:
            return self._fixed[name].table_text()
        with self._lock:
            feed = self._feed(name)
            try:
                feed.read(*self._open())
            except StoreError as error:
                self._close()
                self._set_problem(str(error))
                raise
            return feed.table_text()

    def log_of(self, name: str) -> EventLog:
        """Return what changes in a sweep: nothing in one of a file, or in one that is not there."""
        with self._lock:
            return self._feed(name).log if name in self._groups else EventLog()

    def headline_of(self, device: DeviceSpec, shape: AttentionShape) -> dict[str, Any] | None:
        """Return what names the youngest sweep of a shape on a device, None where there is none."""
        with self._lock:
            same = [each for each in self._groups.values() if (each.device.key, each.shape) == (device.key, shape)]
        return _headline(max(same, key=lambda group: group.last_id)) if same else None

    def device(self, name: str) -> DeviceSpec | None:
        """Return the device of this name that the database or a file knows, as it was when it measured."""
        with self._lock:
            known = [group.device for group in self._groups.values()] + [sweep.device for sweep in self._sweeps]
        return next((device for device in known if device.name == name), None)

    def close(self) -> None:
        """Let go of the database."""
        with self._lock:
            self._close()

    def _feed(self, name: str) -> Feed:
        """Return the sweep of this name, begun where it was not followed."""
        if name not in self._groups:
            raise UsageError(f"No such sweep: {name!r:.100}. Choose one that the page lists.")
        found = self._feeds.setdefault(name, Feed(self._groups[name]))
        self._feeds.move_to_end(name)
        while len(self._feeds) > MAX_FEEDS:
            self._feeds.popitem(last=False)
        return found

    def _open(self) -> tuple[StoreTail, ResultStore]:
        if self._opened is None:
            if self._target.is_missing:
                raise StoreError(f"There is no database at {self._target.label} yet; `tune run` makes it.")
            tail = StoreTail.open(self._target)
            store = ResultStore.open(self._target, read_only=True, lock_timeout_seconds=LOCK_TIMEOUT_SECONDS)
            self._opened = tail, store
        return self._opened

    def _close(self) -> None:
        if self._opened is not None:
            for each in self._opened:
                each.close()
            self._opened = None

    def _find_groups(self, tail: StoreTail) -> None:
        last_id = max((group.last_id for group in self._groups.values()), default=0)
        changed = tail.groups(last_id)
        new = [group for group in changed if group.id not in self._groups]
        self._groups |= {group.id: group for group in changed}
        if new:
            self.log.add("sweeps", [_headline(group) for group in new[:MAX_LISTED]])

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self.log.add("problem", {"text": problem})
            if problem:
                logger.warning("%s", problem)


def _headline(group: TrialGroup) -> dict[str, Any]:
    """Return what names a sweep before it is read."""
    regime = "" if group.regime == "sustained" else f" {group.regime}"
    return {
        "id": group.id,
        "label": f"{group.shape.label}{regime}",
        "shape_label": group.shape.label,
        "device": group.device.name,
    }

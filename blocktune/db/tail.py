"""New rows of a store since the last look, found by a high-water mark: a row that was read is not read again.

Writers run one at a time, so a row that is committed later has a higher number. A candidate that is measured again
keeps its row and gets a younger date, so trials are found by either.
"""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Select, and_, func, or_, select
from sqlalchemy.orm import Session

from blocktune.db.records.reading import readable_records
from blocktune.db.records.records import Regime, Trial
from blocktune.db.records.row_values import UNREADABLE, device_of, whole_shape
from blocktune.db.records.rows import trial_of
from blocktune.db.tables.engine import StoreEngines, open_engines
from blocktune.db.tables.location import StoreTarget
from blocktune.db.tables.models import BestRow, DeviceRow, EnvironmentRow, ShapeRow, TrialRow
from blocktune.db.tables.schema import require_current
from blocktune.db.tables.store_errors import translate_errors
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.shape import AttentionShape

LOCK_TIMEOUT_SECONDS = 2.0
"""How long a reader waits who will look again anyway."""

_START = datetime(1, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Mark:
    """How far the trials of a group were read: the highest number of a row, and the youngest date."""

    row_id: int = 0
    at: datetime = _START


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialGroup:
    """The trials of one shape on one device in one regime: what a search adds to.

    device_id, shape_id: the numbers of their rows.
    count: of the trials that were seen.
    last_id: the number of the youngest row.
    """

    device_id: int
    shape_id: int
    regime: Regime
    device: DeviceSpec = field(compare=False)
    shape: AttentionShape = field(compare=False)
    count: int = field(compare=False)
    last_id: int = field(compare=False)

    @property
    def id(self) -> str:
        """The name of the group in this store."""
        return f"{self.device_id}-{self.shape_id}-{self.regime}"


class StoreTail:
    """A store that is only read, again and again."""

    def __init__(self, engines: StoreEngines) -> None:
        self._engines = engines

    @classmethod
    def open(cls, target: str | Path | StoreTarget | None = None) -> Self:
        """Return the store at a place as `ResultStore.open` takes it.

        Raises:
            UsageError: a URL that cannot be parsed or whose driver is missing.
            StoreError: it is missing, locked, damaged, out of reach, or of another schema.
        """
        place = target if isinstance(target, StoreTarget) else StoreTarget.of(target)
        engines = open_engines(place, read_only=True, lock_timeout_seconds=LOCK_TIMEOUT_SECONDS)
        require_current(engines)
        return cls(engines)

    def groups(self, after_id: int = 0) -> list[TrialGroup]:
        """Return the groups with rows of a number above this one, the one with the youngest row first.

        A shape, device or regime that is not as it was written is left out.

        Raises:
            StoreError: the store does not answer.
        """
        rows = self._all(_groups_query(after_id))
        found: dict[TrialGroup, TrialGroup] = {}
        for group in filter(None, map(_group_of, rows)):
            known = found.get(group)
            found[group] = group if known is None else _join_groups(known, group)
        return sorted(found.values(), key=lambda group: group.last_id, reverse=True)

    def winners_mark(self) -> tuple[int, datetime | None]:
        """Return what differs once a winner was stored or removed: their number and the youngest date.

        Raises:
            StoreError: the store does not answer.
        """
        count, youngest = self._all(select(func.count(BestRow.id), func.max(BestRow.created_at)))[0]
        return count, youngest

    def trials(self, group: TrialGroup, mark: Mark = Mark()) -> tuple[list[Trial], Mark]:  # frozen
        """Return the trials of a group that came after a mark, the oldest first, and the mark after them.

        Raises:
            StoreError: the store does not answer.
        """
        newest = self._all(_newer(select(func.max(TrialRow.id)), group, mark))[0][0]
        if newest is None:
            return [], mark
        query = _newer(select(TrialRow), group, mark).order_by(TrialRow.created_at, TrialRow.id)

        def transaction() -> list[Trial]:
            with Session(self._engines.reader) as session:
                return readable_records(session, query, trial_of, self._engines.target.label)

        with translate_errors(self._engines.target):
            found = self._engines.retry_transaction(transaction)
        now = datetime.now(UTC)  # a date of a wrong clock must not hide what comes until then
        at = max((min(trial.created_at, now) for trial in found), default=mark.at)
        return found, Mark(max(mark.row_id, newest), max(mark.at, at))

    def close(self) -> None:
        """Let go of the database."""
        self._engines.reader.dispose()

    def _all(self, query: Any) -> list[Any]:
        def transaction() -> list[Any]:
            with Session(self._engines.reader) as session:
                return list(session.execute(query))

        with translate_errors(self._engines.target):
            return self._engines.retry_transaction(transaction)


def _groups_query(after_id: int) -> Select[Any]:
    """Count the rows by what an index holds, then look up what they refer to; of attention alone."""
    links = (TrialRow.device_id, TrialRow.shape_id, TrialRow.environment_id)
    counts = select(*links, func.count().label("trials"), func.max(TrialRow.id).label("last_id")).group_by(*links)
    if after_id:
        counts = counts.where(TrialRow.id > after_id)
    each = counts.subquery()
    return (
        select(each.c.trials, each.c.last_id, DeviceRow, ShapeRow, EnvironmentRow.regime)
        .join(DeviceRow, DeviceRow.id == each.c.device_id)
        .join(ShapeRow, ShapeRow.id == each.c.shape_id)
        .join(EnvironmentRow, EnvironmentRow.id == each.c.environment_id)
        .where(ShapeRow.direction.is_not(None))
    )


def _newer(query: Select[Any], group: TrialGroup, mark: Mark) -> Select[Any]:
    own = and_(TrialRow.device_id == group.device_id, TrialRow.shape_id == group.shape_id)
    same = TrialRow.environment.has(EnvironmentRow.regime == str(group.regime))
    return query.where(own, same, or_(TrialRow.id > mark.row_id, TrialRow.created_at > mark.at))


def _group_of(row: Any) -> TrialGroup | None:
    try:
        shape = whole_shape(row.ShapeRow)
        assert isinstance(shape, AttentionShape), "the query asks for no other"
        return TrialGroup(
            device_id=row.DeviceRow.id,
            shape_id=row.ShapeRow.id,
            regime=Regime(row.regime),
            device=device_of(row.DeviceRow),
            shape=shape,
            count=row.trials,
            last_id=row.last_id,
        )
    except UNREADABLE:
        return None


def _join_groups(one: TrialGroup, other: TrialGroup) -> TrialGroup:
    """Return both parts of a group, which two versions of the software measured."""
    return replace(one, count=one.count + other.count, last_id=max(one.last_id, other.last_id))

"""The differences between two sets of winners."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from blocktune.db.exchange.document import problem_order
from blocktune.db.exchange.merging import winner_key
from blocktune.db.records.records import AnyBest


class WinnerChange(StrEnum):
    """How the winner of one shape on one device differs."""

    ADDED = "added"
    REMOVED = "removed"
    CONFIG = "config"
    """Another config won."""
    RETIMED = "retimed"
    """The same config, with another time, origin or software."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WinnerDifference:
    """One shape whose winner is not the same; before is None where it was added, after where it was removed."""

    change: WinnerChange
    before: AnyBest | None
    after: AnyBest | None

    @property
    def winner(self) -> AnyBest:
        """The winner that says which shape and device this is about."""
        best = self.after or self.before
        assert best is not None
        return best

    @property
    def ratio(self) -> float | None:
        """The new time over the old one; None where one was not measured."""
        if self.before is None or self.after is None or not self.before.time_us or not self.after.time_us:
            return None
        return self.after.time_us / self.before.time_us


def differences(before: Iterable[AnyBest], after: Iterable[AnyBest]) -> list[WinnerDifference]:
    """Return what changed, by device and shape."""
    old = {winner_key(best): best for best in before}
    new = {winner_key(best): best for best in after}
    found = []
    for place in old.keys() | new.keys():
        change = _change(old.get(place), new.get(place))
        if change is not None:
            found.append(WinnerDifference(change=change, before=old.get(place), after=new.get(place)))
    return sorted(found, key=lambda each: (each.winner.device.key, problem_order(each.winner.shape)))


def _change(before: AnyBest | None, after: AnyBest | None) -> WinnerChange | None:
    if before is None:
        return WinnerChange.ADDED
    if after is None:
        return WinnerChange.REMOVED
    if before.config != after.config:
        return WinnerChange.CONFIG
    same = (before.time_us, before.origin, before.kernel_hash, before.environment) == (
        after.time_us,
        after.origin,
        after.kernel_hash,
        after.environment,
    )
    return None if same else WinnerChange.RETIMED

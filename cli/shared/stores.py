"""The database that a command reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from blocktune.cli.shared.render import note

if TYPE_CHECKING:
    from blocktune.db.store import ResultStore


@contextmanager
def existing_store(db: str | None) -> Iterator["ResultStore | None"]:
    """The store, upgraded where it is older; None, with a message, where there is none: reading creates nothing."""
    from blocktune.db.store import ResultStore
    from blocktune.db.tables.location import StoreTarget

    target = StoreTarget.of(db)
    if target.path is not None and not target.path.exists():
        note(f"There is no database at {target.label} yet; `tune run` makes it.")
        yield None
        return
    with ResultStore.open(db) as store:
        yield store

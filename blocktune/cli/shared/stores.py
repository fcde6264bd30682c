"""The database that a command reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from blocktune.cli.output.render import note
from blocktune.kernels.values.errors import StoreError

if TYPE_CHECKING:
    from blocktune.db.store import ResultStore
    from blocktune.db.tables.location import StoreTarget


@contextmanager
def existing_store(db: str | None, *, writes: bool = False) -> Iterator["ResultStore | None"]:
    """Yield the store, upgraded where it is older; None, with a message, where there is none: reading creates nothing.

    Args:
        db: its place as the user gave it.
        writes: whether the command changes it. Reading needs no write permission.
    """
    from blocktune.db.store import ResultStore
    from blocktune.db.tables.location import StoreTarget

    target = StoreTarget.of(db)
    if target.is_missing:
        note(f"There is no database at {target.label} yet; `tune run` makes it.")
        yield None
        return
    with ResultStore.open(db) if writes else ResultStore.open_to_read(db) as store:
        store.warn_of_damage()
        _warn_of_distrust(target)
        yield store


def _warn_of_distrust(target: "StoreTarget") -> None:
    """Say that production refuses a store which commands read, so that no call gets the winners that they show."""
    from blocktune.kernels.files.ownership import require_trusted

    try:
        if target.path is not None:
            require_trusted(target.path)
    except StoreError as error:
        note(f"warning: No call gets the winners of {target.label}. {error}")

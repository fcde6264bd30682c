"""New stores as copies of one, whose schema the migrations make once in a process: most of the time of a short test."""

import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from blocktune.db.store import ResultStore
from blocktune.db.tables.engine import StoreEngines


def new_store(path: Path) -> Path:
    """Return a path, where an empty store of the present schema is made unless something is there."""
    if not path.exists():
        path.write_bytes(_empty())
    return path


def copying(make_current: Callable[..., None]) -> Callable[..., None]:
    """Return what takes the place of `make_current`: of a missing file a copy is made first."""
    empty = _empty()

    def copy_and_make(engines: StoreEngines, *work: Any) -> None:
        path = engines.target.path
        with suppress(OSError, ValueError):  # the store says what is wrong with the place
            if path is not None and not path.exists():
                path.write_bytes(empty)
        make_current(engines, *work)

    return copy_and_make


@cache
def _empty() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "store.db"
        with ResultStore.open(made):
            pass
        assert [path.name for path in Path(folder).iterdir()] == [made.name], "all of it is in the file"
        return made.read_bytes()

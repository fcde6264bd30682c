"""New stores as copies of one, whose schema the migrations make once in a process: most of the time of a short test."""

import tempfile
from functools import cache
from pathlib import Path

from blocktune.db.store import ResultStore


def new_store(path: Path) -> Path:
    """Return a path, where an empty store of the present schema is made unless something is there."""
    if not path.exists():
        path.write_bytes(_empty())
    return path


@cache
def _empty() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "store.db"
        with ResultStore.open(made):
            pass
        assert [path.name for path in Path(folder).iterdir()] == [made.name], "all of it is in the file"
        return made.read_bytes()

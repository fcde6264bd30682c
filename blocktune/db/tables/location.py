"""Where the store is: a file or a server."""

import os
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from blocktune.kernels.files.variables import DB
from blocktune.kernels.values.errors import StoreError, UsageError
from blocktune.runtime.store_reader.export_file import SUFFIX
from blocktune.runtime.store_reader.places import default_store_path, is_server, store_file


@dataclass(frozen=True, slots=True)
class StoreTarget:
    """Where a store is: a SQLite file (`path`) or another server (`url`); exactly one is given."""

    path: Path | None = None
    url: URL | None = None

    @property
    def label(self) -> str:
        """The place as people may see it: a URL without its password and without its query, which may hold another."""
        return str(self.path) if self.url is None else self.url.set(query={}).render_as_string(hide_password=True)

    @classmethod
    def of(cls, target: str | Path | None) -> "StoreTarget":
        """Return the target that a path, a URL, the variable BLOCKTUNE_DB or, last, the user's data directory names.

        Raises:
            UsageError: the URL is invalid, an SQLite URL names no file, or the name is a results file's (`*.json`).
        """
        chosen = str(target or DB.text() or default_store_path())
        if not is_server(chosen):
            return cls(path=_file_path(chosen))
        try:
            return cls(url=make_url(chosen))
        except (ArgumentError, ValueError):
            raise UsageError(
                "The database URL cannot be parsed. Write `dialect://user:password@host/database`, and correct --db "
                "or BLOCKTUNE_DB."
            ) from None

    @property
    def is_missing(self) -> bool:
        """Whether it is a file that is not there.

        Raises:
            StoreError: it cannot be said, since a directory may not be searched or the name is too long.
        """
        try:
            return self.path is not None and not self.path.exists()
        except OSError as error:
            raise StoreError(
                f"{self.label} cannot be looked for: {error.strerror}. Give another database by --db or BLOCKTUNE_DB."
            ) from error


def _file_path(name: str) -> Path:
    """Return the file itself, with all links resolved: a store's other files are kept next to the file, not a link."""
    if name == ":memory:":
        raise UsageError("A database in memory cannot be a store, since several processes use it. Give a path.")
    if name.endswith(SUFFIX):
        raise UsageError(
            f"{name} is a results file by its name, and not a store. `tune import` brings it into a store; only the "
            "dispatcher reads it as it is. Give another path by --db or BLOCKTUNE_DB."
        )
    return Path(os.path.realpath(store_file(name)))

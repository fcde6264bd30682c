"""Which file a name or URL means: one answer for commands, which write it, and for production, which reads it."""

import os
from pathlib import Path
from urllib.parse import unquote

from blocktune.kernels.files.file_path import file_path
from blocktune.kernels.files.variables import DB
from blocktune.kernels.values.errors import StoreError, UsageError
from blocktune.runtime.store_reader.export_file import SUFFIX


def default_store_path() -> Path:
    """Return the store in the user's data directory, where nothing else says which to take.

    XDG_DATA_HOME counts unless it is relative: then it would follow the working directory, and the XDG Base Directory
    Specification has it ignored.

    Raises:
        UsageError: the home directory is not known.
    """
    named = Path(os.environ.get("XDG_DATA_HOME", ""))
    directory = named if named.is_absolute() else file_path("~/.local/share")
    return directory / "blocktune" / "blocktune.db"


def is_server(place: str) -> bool:
    """Return whether a place is the URL of a server's database."""
    scheme, is_url, _ = place.partition("://")
    return bool(is_url) and scheme.split("+")[0] != "sqlite"


def store_file(place: str) -> Path:
    """Return the file that a path or an `sqlite:` URL names. Three slashes lead a relative path, four an absolute one;
    a URL writes `%20` for a blank.

    Raises:
        UsageError: the URL names no file or has options, or the file is in a home directory that is not known.
    """
    _, is_url, rest = place.partition("://")
    if not is_url:
        return file_path(place)
    host, _, name = rest.partition("/")
    if "?" in rest:
        raise UsageError(f"An SQLite URL cannot have options, but got {rest[rest.index('?') :]!r:.80}. Give a path.")
    if host or not name:
        raise UsageError(f"`{place:.80}` names no file, and a store is one. Write sqlite:////absolute/path.db.")
    return file_path(unquote(name))


def user_store_path() -> Path:
    """Return the user's own store: BLOCKTUNE_DB, or `blocktune/blocktune.db` in the user's data directory.

    Raises:
        StoreError: BLOCKTUNE_DB names a server, which this reader does not speak to, or a results file.
    """
    place = user_place()
    if place.name.endswith(SUFFIX):
        raise StoreError(
            f"BLOCKTUNE_DB names the results file {place}, but a store is a SQLite file. Give the path of a store."
        )
    return place


def user_place() -> Path:
    """Return the store or results file that BLOCKTUNE_DB names, or the store in the user's data directory.

    Raises:
        StoreError: BLOCKTUNE_DB names a server, or the place is in a home directory that is not known.
    """
    named = DB.text()
    if is_server(named):
        raise StoreError(
            f"The dispatcher cannot read the {named.partition('://')[0]!r:.40} URL in BLOCKTUNE_DB: it reads SQLite "
            "files and results files. Freeze its results with `tune freeze` and name that file, or pass a source of "
            "your own to `Dispatcher`."
        )
    try:
        return store_file(named) if named else default_store_path()
    except UsageError as error:
        raise StoreError(f"{error} BLOCKTUNE_DB names the store.") from error

"""Results wherever they are: an export, a frozen file, another store."""

from pathlib import Path

from blocktune.db.exchange.document import document_from
from blocktune.db.exchange.importing import records_in, records_in_file
from blocktune.db.exchange.merging import Results
from blocktune.db.store import ResultStore
from blocktune.kernels.files.file_path import file_path
from blocktune.kernels.files.reading import is_database
from blocktune.kernels.values.errors import UsageError


def read_results(place: str | Path, *, trials: bool) -> Results:
    """Return the results at a path or URL. They may be anyone's: a store is read as the documents that it would export,
    so that every value passes the same rules.

    Args:
        place: a file that `tune export` or `tune freeze` wrote, a SQLite store, or the URL of a server's.
        trials: whether its trials are wanted too.

    Raises:
        UsageError: there is no such file, or it holds no results; ImportRejectedError names the value.
        StoreError: the store does not answer.
    """
    if isinstance(place, str) and "://" in place:
        return _store_results(place, trials)
    path = file_path(place)
    if _is_sqlite(path):
        return _store_results(str(path), trials)
    bests, kept = records_in_file(path)
    return Results(bests=tuple(bests), trials=tuple(kept) if trials else ())


def _is_sqlite(path: Path) -> bool:
    try:
        return is_database(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}. Name a file of results, or the URL of a database."
        ) from error


def _store_results(place: str, trials: bool) -> Results:
    bests, kept = [], []
    with ResultStore.open(place, read_only=True) as store:
        store.warn_of_damage()
        for device in store.devices():
            found = records_in(
                document_from(device, store.all_bests(device), store.all_trials(device) if trials else None)
            )
            bests += found[0]
            kept += found[1]
    return Results(bests=tuple(bests), trials=tuple(kept))

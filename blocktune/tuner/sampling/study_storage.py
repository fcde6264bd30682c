"""Where a study is kept: in memory, or in a database of Optuna's own that optuna-dashboard can show."""

import optuna
from optuna.exceptions import OptunaError
from optuna.study import Study
from sqlalchemy import create_engine, inspect, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from blocktune.kernels.values.errors import StoreError
from blocktune.tuner.sampling.race_pruner import RacePruner

OWN_TABLE = "studies"
"""The table by which a database of Optuna's is recognised."""


def open_study(name: str, url: str | None = None) -> Study:
    """Return a new study in memory, or the one of this name in Optuna's own storage, which is made if it is missing.

    Its pruner is the race of `tune run`.

    Raises:
        StoreError: the storage cannot be opened, or the database holds something else.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if url is not None:
        require_own(url)
    try:
        return optuna.create_study(
            study_name=name, storage=url, direction="minimize", pruner=RacePruner(), load_if_exists=url is not None
        )
    except (SQLAlchemyError, OptunaError, ImportError) as error:
        raise _unusable(url, error) from error


def storage_url(place: str) -> str:
    """Return the URL of a storage that is named by its URL or by the path of an SQLite file."""
    return place if "://" in place else f"sqlite:///{place}"


def require_own(url: str) -> None:
    """Check that a database is empty or Optuna's: its tables next to those of a results store would break both.

    Raises:
        StoreError: it holds something else, or it cannot be opened.
    """
    try:
        engine = create_engine(url)
        tables = inspect(engine).get_table_names()
        engine.dispose()
    except (SQLAlchemyError, ImportError, ValueError) as error:  # the last of a port that is no number
        raise _unusable(url, error) from error
    if tables and OWN_TABLE not in tables:
        raise StoreError(
            f"{_without_password(url)} holds other tables: {', '.join(tables[:4])}. A study needs a database of "
            "its own: name another file or database."
        )


def _unusable(url: str | None, error: Exception) -> StoreError:
    reason = error.orig if isinstance(error, DBAPIError) else error
    return StoreError(
        f"Optuna cannot keep a study in {_without_password(url)}: {reason}. Name a file, or a URL such as "
        "sqlite:///search.db."
    )


def _without_password(url: str | None) -> str:
    """Return a URL as messages show it; what is no URL is shown as it is."""
    try:
        return make_url(url or "").render_as_string(hide_password=True)
    except (ArgumentError, ValueError):
        return str(url)

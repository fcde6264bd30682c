"""Recorded trials as data frames of pandas, for notebooks.

frame = blocktune.load_sweep("results/sweeps/h200-b2-h32-s8192-d64-bf16.sweep.json.gz")
frame.pivot_table("time_us", "block_m", "block_n", "min")
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from blocktune.db.exchange.trial_table import trial_rows
from blocktune.db.records.records import Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.lab import sweep_file

if TYPE_CHECKING:
    import pandas as pd


def load_sweep(path: str | Path) -> "pd.DataFrame":
    """Return the trials of a recorded sweep, a row each.

    Args:
        path: a file that `tune sweeps` wrote.

    Raises:
        ImportRejectedError: the file is no sweep, or a field is unknown, missing or absurd.
        UsageError: pandas is not installed.
    """
    return _frame(sweep_file.load_sweep(path).trials)


def load_trials(db: str | Path | None = None) -> "pd.DataFrame":
    """Return all trials of a database, the oldest first.

    Args:
        db: its path or URL; by default the one in your data directory, or that of BLOCKTUNE_DB.

    Raises:
        StoreError: the database does not exist or cannot serve.
        UsageError: pandas is not installed.
    """
    with ResultStore.open_to_read(db) as store:
        return _frame(store.trials())


def _frame(trials: Iterable[Trial]) -> "pd.DataFrame":
    try:
        import pandas as pd
    except ImportError as error:
        raise UsageError(
            f'Data frames need pandas, but {error.name} is not installed: pip install "blocktune[frames]".'
        ) from error
    frame = pd.DataFrame(trial_rows(trials))
    if "created_at" in frame:
        frame["created_at"] = pd.to_datetime(frame["created_at"], format="ISO8601", utc=True)
    return frame

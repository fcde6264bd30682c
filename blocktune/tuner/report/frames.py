"""Recorded trials as data frames of pandas or polars, for notebooks.

frame = blocktune.load_sweep("results/sweeps/h200-b2-h32-s8192-d64-bf16.sweep.json.gz")
frame.pivot_table("time_us", "block_m", "block_n", "min")
blocktune.load_sweep("results/sweeps/h200-b2-h32-s8192-d64-bf16.sweep.json.gz", library="polars")
"""

from collections.abc import Iterable
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from blocktune.db.exchange.trial_table import trial_rows
from blocktune.db.records.records import Trial
from blocktune.kernels.values.errors import UsageError, needing
from blocktune.tuner.lab import sweep_file

LIBRARIES = {"pandas": {}, "polars": {"infer_schema_length": None}}
"""What data frames are made with, and what a frame needs besides rows: polars looks at all of them for the types."""


def load_sweep(path: str | Path, *, library: str = "pandas") -> Any:
    """Return the trials of a recorded sweep as a data frame, a row each.

    Args:
        path: a file that `tune lab sweeps` wrote.
        library: `pandas` or `polars`.

    Raises:
        ImportRejectedError: the file is no sweep, or a field is unknown, missing or absurd.
        UsageError: the library is another one or not installed.
    """
    return _frame(sweep_file.load_sweep(path).trials, library)


def load_trials(db: str | Path | None = None, *, library: str = "pandas") -> Any:
    """Return all trials of a database as a data frame, the oldest first.

    Args:
        db: its path or URL; by default the one in your data directory, or that of BLOCKTUNE_DB.
        library: `pandas` or `polars`.

    Raises:
        StoreError: the database does not exist or cannot serve.
        UsageError: the library is another one or not installed.
    """
    with needing("frames", "`load_trials`"):
        from blocktune.db.store import ResultStore
    with ResultStore.open_to_read(db) as store:
        return _frame(store.trials(), library)


def _frame(trials: Iterable[Trial], library: str) -> Any:
    if library not in LIBRARIES:
        raise UsageError(f"`library` must be {' or '.join(LIBRARIES)}, but got {library!r}.")
    with needing("frames", "A data frame"):
        frames = import_module(library)
    rows = [row | {"created_at": datetime.fromisoformat(row["created_at"])} for row in trial_rows(trials)]
    return frames.DataFrame(rows, **LIBRARIES[library])

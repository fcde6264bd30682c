"""Trials as a table of plain values, a row each, for programs that compute with tables.

    rows = trial_rows(store.trials())
    csv_text(rows), parquet_bytes(rows)          # Parquet needs pyarrow

Every field of a trial is a column of its own, nested ones by their path with an underscore: `shape_head_dim`,
`resources_registers`. A kernel's own parameters are one column of JSON, since every kernel has other ones.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from blocktune.db.records.records import Trial
from blocktune.kernels.files.foreign_text import cell, shown
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.errors import needing

Row = dict[str, Any]

_NO_RESOURCES = dict.fromkeys(KernelResources.__dataclass_fields__)


def trial_rows(trials: Iterable[Trial]) -> list[Row]:
    """Return a row for every trial, all with the same columns; None where there is no value."""
    return [_row(trial) for trial in trials]


def csv_text(rows: Sequence[Row]) -> str:
    """Return the rows as CSV with a line of names, text as people may see it and lists as JSON."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _names(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def parquet_bytes(rows: Sequence[Row]) -> bytes:
    """Return the rows as a Parquet file.

    Raises:
        MissingPackageError: pyarrow is not installed.
    """
    with needing("frames", "A Parquet file"):
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    out = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(list(rows)), out)
    return out.getvalue()


def _row(trial: Trial) -> Row:
    environment = trial.environment.to_json() | {"regime": str(trial.environment.regime)}
    features = trial.shape.features.label
    return {
        "device": shown(trial.device.name),
        "shape": trial.shape.label,
        **_prefix_names("shape", trial.shape.to_json() | {"features": features}),
        "kernel": trial.config.kernel,
        "block_m": trial.config.block_m,
        "block_n": trial.config.block_n,
        "num_warps": trial.config.num_warps,
        "num_stages": trial.config.num_stages,
        "parameters": json.dumps(dict(trial.config.extra), sort_keys=True),
        "outcome": str(trial.outcome),
        "time_us": trial.time_us,
        "relative_to_anchor": trial.relative_to_anchor,
        "samples_us": list(trial.samples_us),
        "energy_mj": trial.energy_mj,
        "predicted_us": trial.predicted_us,
        "blocks_per_sm": trial.blocks_per_sm,
        "occupancy": trial.occupancy,
        "limiters": list(trial.limiters),
        **_prefix_names("resources", _NO_RESOURCES if trial.resources is None else asdict(trial.resources)),
        **asdict(trial.telemetry),
        "compile_seconds": trial.compile_seconds,
        "bench_seconds": trial.bench_seconds,
        **{name: shown(value) if isinstance(value, str) else value for name, value in environment.items()},
        "kernel_hash": trial.kernel_hash,
        "created_at": trial.created_at.isoformat(),
        "imported": trial.imported,
        "error": shown(trial.error),
    }


def _prefix_names(word: str, values: Mapping[str, Any]) -> Row:
    return {f"{word}_{name}": value for name, value in values.items()}


def _names(rows: Sequence[Row]) -> list[str]:
    """Return the columns in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(value: Any) -> Any:
    return cell(shown(value)) if isinstance(value, str) else json.dumps(value) if isinstance(value, list) else value

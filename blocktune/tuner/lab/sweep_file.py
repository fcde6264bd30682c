"""A sweep: every trial of one shape on one device with one software, and the compact file that keeps it.

The file is an export (`db/exchange/document.py`) turned by 90 degrees: gzip around one JSON object whose `columns` hold
a list for every field of the trials, nested fields by their path (`config.block_m`, `resources.registers`); null is
absent. What all trials share is written once, next to `columns`. Numbers are cut to what a clock can tell, and what a
model derives is left out, as db/tables/columns.py says.
Equal sweeps give equal bytes. Reading goes the same way back, through the same checks as an import.
"""

import gzip
import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from blocktune.db.exchange.document import FORMAT as EXPORT_FORMAT
from blocktune.db.exchange.document import FORMAT_VERSION as EXPORT_VERSION
from blocktune.db.exchange.document import document_from, save_bytes, shape_order
from blocktune.db.exchange.importing import MAX_TRIALS, records_from
from blocktune.db.exchange.untrusted import Untrusted
from blocktune.db.records.records import Environment, Outcome, Regime, Telemetry, Trial
from blocktune.kernels.files.checksums import CHECKSUM
from blocktune.kernels.files.file_path import file_path, short_stem
from blocktune.kernels.files.reading import DOCUMENT_BYTES, json_value, read_gzip
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.bindings import bound_value
from blocktune.kernels.values.column_kinds import columns_of
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import ImportRejectedError, UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.kernels.values.text import html_table
from blocktune.tuner.measure.protocol import stopped_early

FORMAT = "blocktune-sweep"
FORMAT_VERSION = 1
SUFFIX = ".sweep.json.gz"
MAX_COLUMNS = 64

FIRST_RACED = 2
"""The first version of the measuring protocol in which candidates race."""

_PARTS = {"": Trial, "resources.": KernelResources, "telemetry.": Telemetry}
_DECIMALS = {f"{path}{column.name}": column.decimals for path, part in _PARTS.items() for column in columns_of(part)}
_DERIVED = tuple(
    f"{path}{column.name}" for path, part in _PARTS.items() for column in columns_of(part) if column.derived
)
_SHARED = ("shape", "environment")
_NESTED = ("config", "resources", "telemetry")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The trials of one shape, one per config, from one source per kernel."""

    device: DeviceSpec
    environment: Environment
    shape: AttentionShape
    trials: tuple[Trial, ...]

    @property
    def timed(self) -> dict[KernelConfig, Trial]:
        """The trials with a time, by config."""
        return {trial.config: trial for trial in self.trials if trial.outcome is Outcome.OK}

    @property
    def scores(self) -> dict[KernelConfig, float]:
        """What a search minimises, by config: the time over that of the anchor, which cancels drift. Trials against
        several anchors, as of runs with different defaults, share their times alone."""
        timed = self.timed
        if sum(trial.relative_to_anchor == 1.0 for trial in timed.values()) == 1:
            return {config: trial.relative_to_anchor or 0.0 for config, trial in timed.items()}
        return {config: trial.time_us or 0.0 for config, trial in timed.items()}

    @property
    def complete(self) -> frozenset[KernelConfig]:
        """The configs that were tried with all of their rounds: not those that a race stopped, which there is since
        protocol 2."""
        raced = self.environment.protocol >= FIRST_RACED
        return frozenset(trial.config for trial in self.trials if not (raced and stopped_early(trial.samples_us)))

    def without(self, kernels: Collection[str]) -> Self:
        """Return the same sweep on a device that lacks these kernels.

        Raises:
            UsageError: no other kernel was timed.
        """
        kept = tuple(trial for trial in self.trials if trial.config.kernel not in kernels)
        if not any(trial.outcome is Outcome.OK for trial in kept):
            raise UsageError(
                f"The sweep of {self.label} has no times besides those of {', '.join(sorted(kernels))}, which are "
                "left out. Leave out fewer kernels, or name other sweeps."
            )
        return replace(self, trials=kept)

    @property
    def label(self) -> str:
        """The shape, with the regime where it is not the default."""
        regime = self.environment.regime
        return self.shape.label if regime is Regime.SUSTAINED else f"{self.shape.label} {regime}"

    def _repr_html_(self) -> str:
        """Return a table for a notebook, with the fastest config, and heat maps of the fastest kernels."""
        scores = self.scores
        rows = {"configs": f"{len(self.trials)}, {len(scores)} with a time"}
        if scores:
            best = min(scores, key=lambda config: scores[config])
            time_us = self.timed[best].time_us or 0.0
            rows["fastest"] = f"{best.label}: {time_us:,.1f} µs, {self.shape.flops / time_us / 1e6:.0f} TFLOP/s"
        table = html_table(f"{self.label} on {self.device.name}", rows)
        return f"<div>{table}{bound_value('pictures_of')(self)}</div>"

    @property
    def file_name(self) -> str:
        words = f"{self.device.name} {self.label}".lower().removeprefix("nvidia ")
        return short_stem(re.sub("[^a-z0-9]+", "-", words).strip("-")) + SUFFIX


def sweeps_of(trials: Iterable[Trial]) -> list[Sweep]:
    """Return the newest sweep of every shape, regime and device: of several software versions that of the youngest
    trial counts, and of several sources of a kernel likewise."""
    by_key: dict[tuple[str, AttentionShape, Regime], list[Trial]] = {}
    for trial in sorted(trials, key=lambda trial: trial.created_at):
        if trial.outcome is not Outcome.PREDICTED:
            key = trial.device.key, trial.shape, trial.environment.regime
            by_key.setdefault(key, []).append(trial)
    sweeps = [_newest(found) for found in by_key.values()]
    return sorted(sweeps, key=lambda sweep: (sweep.device.key, *shape_order(sweep.shape), sweep.environment.regime))


def _newest(trials: Sequence[Trial]) -> Sweep:
    """Return the sweep of trials of one device, shape and regime, the oldest of which comes first."""
    environment = trials[-1].environment
    hashes = {trial.config.kernel: trial.kernel_hash for trial in trials if trial.environment == environment}
    kept = {
        trial.config: trial
        for trial in trials
        if trial.environment == environment and trial.kernel_hash == hashes[trial.config.kernel]
    }
    device = replace(trials[-1].device, uuid=None)
    return Sweep(device=device, environment=environment, shape=trials[-1].shape, trials=tuple(kept.values()))


def save_sweep(sweep: Sweep, folder: str | Path) -> Path:
    """Write the file into a folder that exists, in one step, and return its path.

    Raises:
        UsageError: the folder cannot be written to.
    """
    path = file_path(folder) / sweep.file_name
    text = json.dumps(_document(sweep), sort_keys=True, separators=(",", ":"), allow_nan=False)
    try:
        save_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0), path)
    except OSError as error:
        raise UsageError(f"No sweep can be written to {path}: {error}. Name another folder.") from error
    return path


def load_sweep(path: str | Path) -> Sweep:
    """Return the sweep in a file, every field of which was checked.

    Raises:
        ImportRejectedError: the file is no sweep, too large, or a field is unknown, missing or absurd.
    """
    path = file_path(path)
    return _sweep(_unpack(path), path)


def sweep_files(places: Iterable[str | Path]) -> list[Path]:
    """Return the files themselves, and those of the folders, by name. Of several of one name, which are of one device
    and shape, the last counts: a dense sweep of today's kernels takes the place of an older one that held every config.

    Raises:
        UsageError: a place does not exist or is a folder without sweeps.
    """
    found: list[Path] = []
    for place in map(file_path, places):
        inside = sorted(place.glob(f"*{SUFFIX}")) if place.is_dir() else [place] if place.exists() else []
        if not inside:
            raise UsageError(
                f"{place} is neither a sweep (*{SUFFIX}) nor a folder of sweeps. `tune run --exhaustive` records a "
                "sweep and `tune lab sweeps` writes its file."
            )
        found += inside
    return list({path.name: path for path in found}.values())


def _document(sweep: Sweep) -> dict[str, Any]:
    export = document_from(sweep.device, (), sweep.trials)
    return {
        "format": FORMAT,
        "schema": FORMAT_VERSION,
        "device": export["device"],
        "environment": sweep.environment.to_json(),
        "shape": sweep.shape.to_json(),
        "columns": _columns([dict(_flat(trial)) for trial in export["trials"]]),
    }


def _flat(trial: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of an exported trial by their paths, without what all trials share or what follows from the
    rest."""
    for name, value in trial.items():
        if name in _NESTED:
            yield from ((f"{name}.{inner}", _cut(f"{name}.{inner}", part)) for inner, part in (value or {}).items())
        elif name not in (*_SHARED, *_DERIVED, CHECKSUM):  # numbers are cut here
            yield name, _cut(name, value)


def _cut(name: str, value: Any) -> Any:
    decimals = _DECIMALS.get(name)
    if decimals is None or value is None:
        return value
    return [round(item, decimals) for item in value] if isinstance(value, list) else round(value, decimals)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return a list for every field that any row has."""
    names = sorted({name for row in rows for name, value in row.items() if value is not None})
    return {name: [row.get(name) for row in rows] for name in names}


def _unpack(path: Path) -> Any:
    """Return the JSON value in a gzip file that does not unpack to too much."""
    try:
        return json_value(read_gzip(path, DOCUMENT_BYTES))
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise ImportRejectedError(
            f"{path} is not JSON in gzip, as sweeps are: {error}. Write it again by `tune lab sweeps`."
        ) from error
    except OSError as error:
        raise ImportRejectedError(f"{path} cannot be read: {error.strerror}. Name another file.") from error


def _sweep(document: Any, path: Path) -> Sweep:
    parts = Untrusted(document, path.name).object(("format", "schema", "device", "environment", "shape", "columns"))
    parts["format"].match(FORMAT, f"`{FORMAT}`")
    parts["schema"].integer(1, FORMAT_VERSION)
    environment = parts["environment"].parse_with(Environment.from_json, "an environment")
    shared = {"shape": parts["shape"].value, "environment": environment.digest}
    export = {
        "format": EXPORT_FORMAT,
        "schema": EXPORT_VERSION,
        "device": parts["device"].value,
        "environments": {environment.digest: parts["environment"].value},
        "bests": [],
        "trials": [row | shared for row in _rows(parts["columns"])],
    }
    _, trials = records_from(export)
    if not trials or len({trial.config for trial in trials}) != len(trials):
        parts["columns"].reject("one trial of every config, and at least one")
    return Sweep(device=trials[0].device, environment=environment, shape=trials[0].shape, trials=tuple(trials))


def _rows(node: Untrusted) -> list[dict[str, Any]]:
    """Return the rows of columns of equal length, nested again."""
    columns = {name: entry.values(MAX_TRIALS) for name, entry in node.entries(MAX_COLUMNS).items()}
    if len({len(column) for column in columns.values()}) != 1:
        node.reject("columns of equal length")
    rows: list[dict[str, Any]] = [{} for _ in next(iter(columns.values()))]
    for name, column in columns.items():
        outer, dot, inner = name.partition(".")
        if bool(dot) != (outer in _NESTED):
            node.reject(f"columns such as `outcome` or `config.block_m`, and not `{ascii(name)[1:-1]:.80}`")
        for row, item in zip(rows, column, strict=True):
            if item is not None:
                place = row.setdefault(outer, {}) if dot else row
                place[inner or outer] = item
    return rows

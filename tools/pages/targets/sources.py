"""Where cells come from: files of results/ that `tune bench`, the programs of tools and measurements of one
table have written."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from blocktune.cli.output.json_files import read_document
from blocktune.cli.tune.bench_file import read_bench
from blocktune.kernels.hopper.backward.parts import default_parts
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compare.report import PEERS
from tools.pages.bench_tables import GUESTS, BenchRow
from tools.pages.recorded import backward_peer_tables, plain_tables
from tools.pages.targets.cells import Cell, Measurement, Record, fastest, in_order, short_device, short_label

RIVALS = ("cudnn", "fa3", "fa4", "flex")
"""Peers of which the fastest is the best."""

SHORT = PEERS | GUESTS | {"flash-attn-4": "FA4"}
"""Contenders as the page calls them."""

VERSIONS = ("triton", "torch", "cudnn", "fa3-fwd", "flash-attn-4")
"""Software whose versions the page names."""


class Source(Protocol):
    """Some cells of one device."""

    def read(self, results: Path) -> list[Measurement]:
        """Return what a folder of results has of them; nothing where it has no such file."""


def every(shape: AttentionShape) -> bool:
    """Return that it is wanted, whichever shape it is."""
    return True


def every_row(cells: Sequence[str]) -> bool:
    """Return that it is wanted, whatever stands in it."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRows:
    """Rows of a bench: what calls get next to the fastest of some contenders."""

    file: str
    shapes: Callable[[AttentionShape], bool] = every
    rivals: Collection[str] = RIVALS

    def read(self, results: Path) -> list[Measurement]:
        if not (results / self.file).exists():
            return []
        document = read_bench(results / self.file)
        rows = [(BenchRow(row), _record(self.file, document, row)) for row in document["rows"]]
        wanted = [(bench, record) for bench, record in rows if self.shapes(bench.shape)]
        timed = {name for bench, _ in wanted for name in self.rivals if bench.timing(name)}
        cells = [cell for bench, record in wanted if (cell := self._cell(bench, record))]
        if not cells:
            return []
        sustained = ", sustained" if document["regime"] == "sustained" else ""
        measurement = Measurement(
            device=short_device(document["device"]["name"]) + sustained,
            software=_peer_versions(document["environment"]),
            rivals=tuple(SHORT[name] for name in in_order(timed, SHORT)),
            cells=tuple(cells),
        )
        return [measurement]

    def _cell(self, bench: BenchRow, record: Record) -> Cell | None:
        own = bench.timing(bench.own)
        times = {SHORT[name]: timing["median_us"] for name in self.rivals if (timing := bench.timing(name))}
        return None if own is None else fastest(short_label(bench.shape), own["median_us"], times, record)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRows:
    """Rows of backwards that tools/bench/backward_peers.py has timed.

    rivals: their names in the file. of_share: whether a rival works on all pairs, of which ours takes a share alone.
    """

    file: str
    shapes: Callable[[AttentionShape], bool]
    rivals: Collection[str] = tuple(backward_peer_tables.PEERS)
    of_share: bool = False

    def read(self, results: Path) -> list[Measurement]:
        if not (results / self.file).exists():
            return []
        document = read_document(
            results / self.file, "results", backward_peer_tables.FORMAT, backward_peer_tables.SCHEMA
        )
        wanted = [row for row in document["rows"] if self.shapes(AttentionShape.from_json(row["shape"]))]
        found = [(row, cell) for row in wanted if (cell := self._cell(row, _record(self.file, document, row)))]
        if not found:
            return []
        timed = {name for row, _ in found for name in self.rivals if name in row["time_us"]}
        measurement = Measurement(
            device=short_device(document["device"]),
            software=_versions(document["environment"]),
            rivals=tuple(SHORT.get(name, name) for name in in_order(timed, self.rivals)),
            cells=tuple(cell for _, cell in found),
        )
        return [measurement]

    def _cell(self, row: Mapping[str, Any], record: Record) -> Cell | None:
        shape, times = AttentionShape.from_json(row["shape"]), row["time_us"]
        own_us = times.get(backward_peer_tables.DEFAULT) or _in_parts(shape, times)
        share = row["share"] if self.of_share else 1.0
        rivals = {SHORT.get(name, name): share * times[name] for name in self.rivals if name in times}
        return None if own_us is None else fastest(short_label(shape), own_us, rivals, record)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """Rows of a table with the ratio in one of its columns; nothing where it has no such column.

    rival: what the ratio is to. rows: which of them, by their cells. label: the columns that name a row; empty for the
    first one.
    """

    file: str
    column: str
    rival: str
    rows: Callable[[Sequence[str]], bool] = every_row
    label: Sequence[str] = ()

    def read(self, results: Path) -> list[Measurement]:
        if not (results / self.file).exists():
            return []
        document = read_document(results / self.file, "table", plain_tables.FORMAT, plain_tables.SCHEMA)
        columns = document["columns"]
        if self.column not in columns:
            return []
        place = columns.index(self.column)
        rows = [row for row in document["rows"] if self.rows(row) and row[place] != "-"]
        record = _record(self.file, document, document)
        cells = [
            Cell(label=self._label(columns, row), ratio=float(row[place]), rival=self.rival, record=record)
            for row in rows
        ]
        if not cells:
            return []
        measurement = Measurement(
            device=short_device(document["device"]),
            software=_versions(document["environment"]),
            rivals=(self.rival,),
            cells=tuple(cells),
        )
        return [measurement]

    def _label(self, columns: Sequence[str], row: Sequence[str]) -> str:
        return ", ".join(f"{name} {row[columns.index(name)]}" for name in self.label) or row[0]


def _in_parts(shape: AttentionShape, times: Mapping[str, float]) -> float | None:
    """Return the time of a group of heads in as many parts as the default has; None where parts were not timed."""
    prefix = backward_peer_tables.PARTS
    by_parts = {int(name.removeprefix(prefix)): us for name, us in times.items() if name.startswith(prefix)}
    return by_parts[default_parts(shape, tuple(by_parts))] if by_parts else None


def _record(file: str, document: Mapping[str, Any], row: Mapping[str, Any]) -> Record:
    """Return what a row was measured with; older rows do not say when, and their document stands for them."""
    return Record(file=file, taken_at=row.get("taken_at", document["created_at"]), commit=row.get("commit") or "")


def _versions(environment: Mapping[str, str]) -> dict[str, frozenset[str]]:
    return {name: frozenset({environment[name]}) for name in VERSIONS if "." in (environment.get(name) or "")}


def _peer_versions(environment: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Return the versions of a bench, which names the packages of its rivals in words."""
    peers = dict(words.rsplit(" ", 1) for words in environment.get("peers", {}).values())
    return _versions({**environment, **peers})

"""Whether `blocktune.offline.explain` tells of packages' kernels what Triton itself compiles for their launches.

python -m tools.libraries.offline_check FOLDER [PACKAGE ...] [--devices h200,a100] [--out results/offline.table.json]

FOLDER has a folder for each package, `pip install --target FOLDER/NAME --no-deps NAME`, and `deps` for what they need.
For each package and device, two processes call the functions of public_calls.py on a GPU that stands in and launches
nothing: one as `explain` does, the other with Triton's own tuner and compiler. A kernel is exact if the code that
Triton launches is a row of its table, with the same registers, spills and shared memory.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from triton.runtime.jit import JITFunction

from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.tuner.compile.compiler import resources_of
from blocktune.tuner.dry_run.config_row import Flaw
from blocktune.tuner.dry_run.config_table import OfflineTable
from blocktune.tuner.dry_run.explain import CompileTarget, tables_of
from blocktune.tuner.dry_run.recorder import DryLaunch, dry_launches
from blocktune.tuner.measure.environment import source_commit
from blocktune.tuner.offline.stand_in import stand_in
from tools.libraries.public_calls import CALLS

COLUMNS = ("package", "device", "functions", "kernels", "exact", "configs", "do not fit", "spill", "code of another")

Row = list[str]
Taken = tuple[int, int, int]
"""Registers, spilled bytes and shared bytes."""


@dataclass(slots=True)
class PackageRecord:
    """What was found of a package on a device. kernels: those launched, by name, and whether all launches are exact."""

    package: str
    device: str
    functions: int
    kernels: dict[str, bool] = field(default_factory=dict)
    configs: int = 0
    flaws: dict[str, int] = field(default_factory=lambda: dict.fromkeys(map(str, Flaw), 0))
    problems: list[str] = field(default_factory=list)

    def cells(self) -> list[str]:
        """Return the row of a table."""
        exact = sum(self.kernels.values())
        counts = (self.functions, len(self.kernels), exact, self.configs, *(self.flaws[str(flaw)] for flaw in ORDER))
        return [self.package, self.device, *(f"{count:,}" for count in counts)]


ORDER = (Flaw.UNFIT, Flaw.SPILLS, Flaw.DUPLICATES)


@contextmanager
def compiled_launches() -> Iterator[list[tuple[str, Any]]]:
    """Give the kernels that Triton compiles and launches meanwhile, by name."""
    found: list[tuple[str, Any]] = []
    stock = JITFunction.run

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = stock(function, *args, **kwargs)
        found.append((f"{function.fn.__module__}:{function.fn.__qualname__}", compiled))
        return compiled

    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = stock


def launched_by_triton(call: Callable[[], object], device: DeviceSpec) -> dict[tuple[str, str], Taken]:
    """Return what the kernels of a function take that Triton compiles itself, by name and key of the code."""
    with stand_in(device), compiled_launches() as found:
        call()
        return {(name, compiled.hash): _taken(resources_of(compiled)) for name, compiled in found}


def _taken(resources: Any) -> Taken:
    return resources.registers, resources.spill_bytes, resources.shared_bytes


def told(launches: Sequence[DryLaunch], tables: Sequence[OfflineTable]) -> dict[tuple[str, str], Taken]:
    """Return what the tables tell of each config, by name and key of the code."""
    found = {}
    for launch, table in zip(launches, tables, strict=True):
        for (config, recorded), row in zip(launch.configs.items(), table.rows, strict=True):
            assert row.config == config
            if recorded.specialization is not None and row.resources is not None:
                found[launch.kernel, recorded.specialization.key] = _taken(row.resources)
    return found


Told = dict[tuple[str, str], Taken]


@dataclass(frozen=True, slots=True)
class Answer:
    """The facts of one function. rows: of its tables. flaws: how many configs have each. problem: its error."""

    taken: Told = field(default_factory=dict)
    rows: int = 0
    flaws: tuple[int, ...] = (0, 0, 0)
    problem: str = ""


def explained(folder: Path, package: str, device: DeviceSpec) -> list[Answer]:
    """Return what the tables tell of each function of a package."""

    def explain(call: Callable[[], object]) -> Answer:
        launches = dry_launches(call, device)
        tables = tables_of(launches, CompileTarget(device.limits, device), device)
        rows = [row for table in tables for row in table.rows]
        flaws = tuple(sum(flaw in row.flaws for row in rows) for flaw in ORDER)
        return Answer(told(launches, tables), len(rows), flaws)

    return _answers(folder, package, explain)


def launched(folder: Path, package: str, device: DeviceSpec) -> list[Answer]:
    """Return what the kernels of each function of a package take that Triton compiles itself."""
    return _answers(folder, package, lambda call: Answer(launched_by_triton(call, device)))


def _answers(folder: Path, package: str, answer: Callable[[Callable[[], object]], Answer]) -> list[Answer]:
    sys.path[:0] = [str(folder / package), str(folder / "deps")]
    found = []
    for call in CALLS[package]:
        try:
            found.append(answer(call))
        except Exception as error:  # a package's own, which the record has
            found.append(Answer(problem=f"{call.__name__}: {type(error).__name__}: {error!s:.300}"))
    return found


def check(folder: Path, package: str, device: DeviceSpec) -> PackageRecord:
    """Return the record of a package's functions on a device; by two processes, as libraries keep what they launch."""
    ours, theirs = (_apart(ask, folder, package, device) for ask in (explained, launched))
    record = PackageRecord(package, device.name, len(ours))
    for mine, triton in zip(ours, theirs, strict=True):
        record.problems += filter(None, (mine.problem, triton.problem))
        record.configs += mine.rows
        for flaw, count in zip(ORDER, mine.flaws, strict=True):
            record.flaws[str(flaw)] += count
        for (name, key), taken in triton.taken.items():
            same = mine.taken.get((name, key)) == taken
            record.kernels[name] = record.kernels.get(name, True) and same
            if not same:
                record.problems.append(f"{name}: launched {taken}, told {mine.taken.get((name, key))}")
    return record


def _apart(ask: Callable[..., list[Answer]], *arguments: object) -> list[Answer]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        return processes.submit(ask, *arguments).result()


def document(records: Sequence[PackageRecord], packages: dict[str, str], earlier: Sequence[Row]) -> dict[str, Any]:
    """Return the table of all packages; earlier: rows of those that were not checked again."""
    found = [record.cells() for record in records]
    checked = [row[:2] for row in found]
    rows = [row for row in earlier if row[:2] not in checked] + found
    kernels, exact = (sum(int(row[COLUMNS.index(name)]) for row in rows) for name in ("kernels", "exact"))
    return {
        "format": "blocktune-table",
        "schema": 1,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": source_commit(),
        "device": "Compiled without a GPU",
        "environment": {"triton": version("triton"), "torch": version("torch")} | packages,
        "how": (
            f"`python -m tools.libraries.offline_check`: kernels that public functions launch, {exact} of {kernels} "
            "exact. A kernel is exact if what Triton's own tuner and compiler launch, on a GPU that stands in, is a "
            "row of its table with the same cache key, registers, spills and shared memory."
        ),
        "columns": list(COLUMNS),
        "rows": rows,
    }


def versions_in(folder: Path) -> dict[str, str]:
    """Return the versions of the packages of a folder."""
    found = {}
    for package in CALLS:
        found |= {each.name.lower(): each.version for each in distributions(path=[str(folder / package)])}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the packages, print their records, and return 1 where a kernel is not exact or a function fails."""
    parser = argparse.ArgumentParser(description="Offline tables next to what Triton compiles")
    parser.add_argument("folder", type=Path)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE")
    parser.add_argument("--devices", default="h200")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    records = []
    for package in given.packages or [name for name in CALLS if (given.folder / name).exists()]:
        for device in given.devices.split(","):
            record = check(given.folder, package, device_named(device))
            records.append(record)
            sys.stdout.write("  ".join([*record.cells(), *record.problems]) + "\n")
            sys.stdout.flush()
    if given.out is not None:
        earlier = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
        text = json.dumps(document(records, versions_in(given.folder), earlier), indent=1, sort_keys=True)
        given.out.write_text(text + "\n")
    return int(any(record.problems for record in records))


if __name__ == "__main__":
    sys.exit(main())

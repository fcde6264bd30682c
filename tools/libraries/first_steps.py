"""Public functions of packages in processes of their own: first steps, second starts and the GPU's time afterwards,
under Triton's own tuner and under `blocktune.install()`.

python -m tools.libraries.first_steps FOLDER [PACKAGE ...] --out results/h200.first-steps.table.json

FOLDER is that of package_process.py. One process runs at a time: with empty caches under each tuner, then once more
with what the first one kept, Triton's with TRITON_CACHE_AUTOTUNING=1. Seconds are those of the call, without imports.
A package whose processes do not end within --seconds is left for the next time; the file keeps those that did.
"""

import argparse
import dis
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from blocktune.db.exchange.document import save_text
from tests.support.ranks.document import new_document, table
from tools.libraries.offline_check import versions_in
from tools.libraries.package_process import paths_of, run_program
from tools.libraries.public_calls import CALLS, LONG_CALLS

TUNERS = {"Triton": {"TRITON_CACHE_AUTOTUNING": "1"}, "blocktune": dict[str, str]()}
"""Variables of their processes."""
STARTS = ("first", "second")
COLUMNS = (
    "package",
    "function",
    "tuned kernels",
    "first step, Triton",
    "first step",
    "times as fast",
    "second start, Triton",
    "second start",
    "GPU, Triton",
    "GPU",
    "times as fast on the GPU",
)
HOW = (
    "public functions of packages under Triton's tuner and under `blocktune.install()`, one process at a time; a "
    "second start has the caches of the first, Triton's with TRITON_CACHE_AUTOTUNING=1. The GPU's time is that of the "
    "Triton and library kernels of a call, in the median of {calls} calls after the second start; in `_long`, 32,768 "
    "tokens follow 512."
)
CALLS_TIMED, CALLS_BEFORE = 40, 5

Row = list[str]


def functions_of(package: str) -> tuple[Callable[[], None], ...]:
    return *CALLS[package], *LONG_CALLS.get(package, ())


def play(package: str, tuner: str) -> None:
    """Call the functions of a package, and print of each what it took, as JSON."""
    if tuner == "blocktune":
        import blocktune

        blocktune.install()
    torch.zeros(1, device="cuda")
    for function in functions_of(package):
        sys.stdout.write(json.dumps({"function": function.__name__, **_played(function)}) + "\n")
        sys.stdout.flush()


def _played(function: Callable[[], None]) -> dict[str, Any]:
    """Return the seconds of a first call, how many kernels were tuned or found for it, and the GPU's time of later
    ones."""
    try:
        for name in _imports(function):
            import_module(name)
        before, begun = _choices(), time.monotonic()
        function()
        torch.cuda.synchronize()
        seconds = time.monotonic() - begun
        return {"first_s": seconds, "kernels": _choices() - before, "gpu_us": gpu_us(function)}
    except Exception as error:  # a package's own, which the record has
        return {"error": f"{type(error).__name__}: {error!s:.300}"}


def _imports(function: Any) -> Iterator[str]:
    """Yield the modules that a function imports."""
    return (each.argval for each in dis.get_instructions(function) if each.opname == "IMPORT_NAME")


def _choices() -> int:
    from blocktune.runtime.autotuned.kernel import kernels

    return sum(len(kernel.choices) for kernel in kernels)


def gpu_us(function: Callable[[], None]) -> float:
    """Return the time of a call's kernels in microseconds, without those of PyTorch: the median of calls."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(CALLS_BEFORE):
        function()
    sums = []
    for _ in range(CALLS_TIMED):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as taken:
            function()
            torch.cuda.synchronize()
        events = [event for event in taken.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        sums.append(sum(event.device_time for event in events if event.name.isidentifier()))
    return statistics.median(sums)


def rows_of(package: str, told: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> list[Row]:
    """Return a row for each function that all four processes ran, by their answers."""
    rows = []
    for function in functions_of(package):
        name = function.__name__
        found = {key: next(one for one in lines if one["function"] == name) for key, lines in told.items()}
        rows.append([package, name, *_cells(found)])
    return rows


def _cells(found: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[str]:
    """Return the cells of one function; of one that fails, its error."""
    if errors := [one["error"] for one in found.values() if "error" in one]:
        return [errors[0], *[""] * (len(COLUMNS) - 3)]
    first, second = ([found[tuner, start]["first_s"] for tuner in TUNERS] for start in STARTS)
    gpu = [found[tuner, "second"]["gpu_us"] for tuner in TUNERS]
    return [
        str(found["blocktune", "first"]["kernels"]),
        *(f"{seconds:.2f} s" for seconds in first),
        f"{first[0] / first[1]:.1f}",
        *(f"{seconds:.2f} s" for seconds in second),
        *(f"{time_us:.1f} µs" for time_us in gpu),
        f"{gpu[0] / gpu[1]:.3f}" if all(gpu) else "",
    ]


def lines_of_package(folder: Path, package: str, end: float) -> dict[tuple[str, str], list[dict[str, Any]]] | None:
    """Return what the processes of a package print, by tuner and start; None if one does not run to its end."""
    told = {}
    with tempfile.TemporaryDirectory() as caches:
        for start in STARTS:
            for tuner, variables in TUNERS.items():
                words = ("first_steps", "--play", tuner, str(folder), package)
                seconds = end - time.monotonic()
                lines, problem = run_program(
                    words, paths_of(folder, [package]), Path(caches) / tuner, seconds, variables
                )
                if problem:
                    sys.stdout.write(f"{package}: {tuner}, {start} start: {problem}\n")
                    return None
                told[tuner, start] = lines
    return told


def measure(folder: Path, packages: Sequence[str], out: Path, seconds: float) -> None:
    """Fill a file with the rows of packages, at once after each."""
    end = time.monotonic() + seconds
    rows: list[Row] = json.loads(out.read_text())["rows"] if out.exists() else []
    for package in packages:
        if time.monotonic() >= end or (told := lines_of_package(folder, package, end)) is None:
            continue
        added = rows_of(package, told)
        rows = [row for row in rows if row[0] != package] + added
        sys.stdout.writelines("  ".join(row) + "\n" for row in added)
        sys.stdout.flush()
        document = new_document(torch.device("cuda"))
        document["environment"] |= versions_in(folder)
        found = table(document, HOW.format(calls=CALLS_TIMED), COLUMNS, rows)
        save_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n", out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument("--play", metavar="TUNER", choices=TUNERS, help="be a process that is measured")
    given = parser.parse_args()
    packages = given.packages or [name for name in CALLS if (given.folder / name).exists()]
    if given.play:
        play(packages[0], given.play)
    elif given.out is None:
        parser.error("--out is missing")
    else:
        measure(given.folder, packages, given.out, given.seconds)


if __name__ == "__main__":
    main()

"""Runs the small cases of every kernel under compute-sanitizer and writes down what it found:

    python3 -P tools/checks/sanitize.py --record results/h100.sanitizer.json --kernel flash_fwd --tool
    memcheck

Every kernel has a process of its own, first without a tool, which fills Triton's cache, then under each tool. Without
`--kernel` all of the registry run; without `--tool` all run under memcheck, and those for Hopper under racecheck, too.
A file that is there is added to: what ran again replaces what was known. Needs PyTorch, Triton and the package on the
import path, and nothing that tests alone need.
"""

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from blocktune.cli.output.json_files import read_document, write_atomically
from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.hardware.nvml import driver_version
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.errors import BlocktuneError, NoDeviceError, UsageError
from blocktune.runtime.store_reader.provenance import ptxas_version
from blocktune.tuner.measure.environment import source_commit
from tools.pages.checks.sanitizer_tables import FORMAT, NO_TOOL, SCHEMA, SUFFIX

CASE = Path(__file__).with_name("sanitizer_case.py")
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
RACY = tuple(name for name in KERNELS if "hopper" in name or "fp8" in name or "tma" in name)
"""Kernels whose threads share memory by barriers of their own or the copy engine's: what racecheck is for."""
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "BLOCKTUNE_MISSES": "off"}
"""Each tensor in memory of its own, so that no access past its end lands in another one."""
SUMMARY = re.compile(
    r"^=+ (?:ERROR SUMMARY: (?P<errors>\d+) errors?|"
    r"RACECHECK SUMMARY: \d+ hazards? displayed \((?P<races>\d+) errors?, (?P<warnings>\d+) warnings?\))",
    re.MULTILINE,
)
MESSAGE = re.compile(r"^=+ (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY)(\S.*)$", re.MULTILINE)
MAX_MESSAGES, MAX_CHARACTERS = 10, 300


@dataclass(frozen=True, slots=True)
class Checker:
    """Where compute-sanitizer is, what else it is given, and how many seconds a process may take."""

    program: str
    options: tuple[str, ...]
    seconds: float

    def command(self, tool: str, log: Path, case: Sequence[str]) -> list[str]:
        """The command line of a case, under a tool or without."""
        if tool == NO_TOOL:
            return list(case)
        return [self.program, "--tool", tool, "--log-file", str(log), *self.options, *case]

    def version(self) -> str:
        """The last line of what `--version` says, which has the number.

        Raises:
            UsageError: there is no such program.
        """
        try:
            told = subprocess.run([self.program, "--version"], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise UsageError(
                f"No such checker: {self.program} ({error}). It is part of the CUDA toolkit; name it with --sanitizer."
            ) from error
        return told.strip().splitlines()[-1].strip() if told.strip() else ""


def check(checker: Checker, kernel: str, tool: str, case_arguments: Sequence[str]) -> dict[str, Any]:
    """Run a kernel's cases in a process of their own. Returns a row of the record.

    errors is what the tool counted, None where it gave no summary; a process that hangs or dies shows in `exit`.
    """
    case = [sys.executable, "-P", str(CASE), "--kernel", kernel, *case_arguments]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        started = time.monotonic()
        exit_code, output, complaint = _run(checker.command(tool, log, case), checker.seconds)
        seconds = time.monotonic() - started
        said = log.read_text(errors="replace") if log.exists() else ""
    summary = SUMMARY.search(said)
    counted = summary and (summary["errors"] or summary["races"])
    return {
        "kernel": kernel,
        "tool": tool,
        "commit": source_commit(),
        "cases": [json.loads(line) for line in output.splitlines() if line.startswith("{")],
        "errors": int(counted) if counted else None,
        "warnings": int(summary["warnings"]) if summary and summary["warnings"] else 0,
        "messages": [text[:MAX_CHARACTERS] for text in MESSAGE.findall(said)[:MAX_MESSAGES]],
        "exit": exit_code,
        "complaint": "" if exit_code == 0 else complaint[-MAX_CHARACTERS:],
        "seconds": round(seconds, 1),
    }


def _run(command: Sequence[str], seconds: float) -> tuple[int | str, str, str]:
    """Exit code, or `timeout`; standard output; the end of standard error. All of a hanging group is killed."""
    process = subprocess.Popen(
        command,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, complaint = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, complaint = process.communicate()
        return "timeout", output, complaint
    return process.returncode, output, complaint.strip()


def is_clean(row: Mapping[str, Any]) -> bool:
    """Whether the cases ran to their end, left no value that is not finite, and the tool found nothing."""
    counted = row["tool"] == NO_TOOL or row["errors"] == 0
    return row["exit"] == 0 and counted and bool(row["cases"])


def plan(kernels: Sequence[str], tools: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(kernel, tool) in the order in which they run."""
    for kernel in kernels:
        yield kernel, NO_TOOL
        yield from ((kernel, tool) for tool in tools or ("memcheck", *(("racecheck",) if kernel in RACY else ())))


def record(path: Path, version: str, new: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows into the file, in place of those of the same kernels and tools.

    Raises:
        UsageError: the file holds something else, or is of another device or software.
    """
    document = _begin(path) | {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "tool_version": version,
    }
    rows = {(row["kernel"], row["tool"]): row for row in (*document["rows"], *new)}
    document["rows"] = [rows[key] for key in sorted(rows)]
    write_atomically(path, json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n")


def _begin(path: Path) -> dict[str, Any]:
    here = _empty()
    if not path.exists():
        return here
    there = read_document(path, "sanitizer record", FORMAT, SCHEMA)
    if (there["device"], there["environment"]) != (here["device"], here["environment"]):
        raise UsageError(
            f"A record is of one device and software, but {path} is of {there['device']}, {there['environment']}, and "
            f"this is {here['device']}, {here['environment']}. Name another file."
        )
    return there


def _empty() -> dict[str, Any]:
    try:
        device = current_device()
    except NoDeviceError:
        device = None
    environment = {name: metadata.version(name) for name in ("torch", "triton")} | {
        "python": platform.python_version(),
        "ptxas": ptxas_version(device.limits.sm_arch) if device is not None else "",
        "driver": driver_version(),
    }
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "device": None if device is None else device.name,
        "environment": environment,
        "rows": [],
    }


def line_of(row: Mapping[str, Any]) -> str:
    """A row in words."""
    found = "ran" if row["tool"] == NO_TOOL else f"{row['errors']} errors, {row['warnings']} warnings"
    ending = "" if is_clean(row) else f"  <- exit {row['exit']} {row['complaint'].strip().splitlines()[-1:]}"
    return f"{row['kernel']:24} {row['tool']:10} {len(row['cases'])} cases, {found}, {row['seconds']} s{ending}"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar=f"FILE{SUFFIX}", help="write down what was found")
    parser.add_argument("--kernel", action="append", choices=list(KERNELS), help="may be repeated; without it: all")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="may be repeated")
    parser.add_argument("--sanitizer", default=shutil.which("compute-sanitizer") or "compute-sanitizer")
    parser.add_argument("--option", action="append", default=[], metavar="--X=Y", help="further option of the checker")
    parser.add_argument("--case", action="append", default=[], metavar="--X=Y", help="option of sanitizer_case.py")
    parser.add_argument("--seconds", type=float, default=600.0, help="that a process may take")
    given = parser.parse_args(arguments)
    if given.record is not None and not given.record.name.endswith(SUFFIX):
        parser.error(f"The record must be named *{SUFFIX}, but got {given.record}. Rename it.")
    return given


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for, and record each row as soon as it is there. Returns 1 unless all rows are clean."""
    given = parse(arguments)
    checker = Checker(given.sanitizer, tuple(given.option), given.seconds)
    try:
        version, clean = checker.version(), True
        for kernel, tool in plan(given.kernel or list(KERNELS), given.tool or ()):
            row = check(checker, kernel, tool, given.case)
            if given.record is not None:
                record(given.record, version, [row])
            print(line_of(row), flush=True)
            clean &= is_clean(row)
    except BlocktuneError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

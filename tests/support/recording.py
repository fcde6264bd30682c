"""`pytest --record FILE.gpu-tests.json --record-costs FILE.host-cost.json` writes down what ran, on which device and
with which software. tools/pages/checks/gpu_test_tables.py makes tables of the files.

A file that is there is added to, so that a suite may be run in parts: test files and kernels that ran again replace
what was known of them. It must be of the same device and software.
"""

import json
import os
import platform
from collections import Counter
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.hardware.nvml import driver_version
from blocktune.kernels.values.errors import NoDeviceError, UsageError
from blocktune.runtime.store_reader.provenance import ptxas_version
from blocktune.tuner.measure.environment import source_commit
from tools.pages.checks.gpu_test_tables import COSTS, FORMATS, SCHEMA, SUITE, read_run

HOST_COST = "host_cost"
"""The property by which a test says what it has timed: {"kernel": name, "calls": count, "times": {...}}, or of an entry
point {"entry": its call, "times": {...}}."""

OPTIONS = {"--record": SUITE, "--record-costs": COSTS}
MESSAGE_CHARACTERS = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    for option, suffix in OPTIONS.items():
        parser.addoption(option, type=Path, metavar=f"FILE{suffix}", help=f"Record the run in this file (*{suffix}).")


def pytest_configure(config: pytest.Config) -> None:
    given = {suffix: config.getoption(option) for option, suffix in OPTIONS.items()}
    if any(given.values()) and not hasattr(config, "workerinput"):  # workers report to the process that has none
        config.pluginmanager.register(Recorder(config, {key: path for key, path in given.items() if path is not None}))


class Recorder:
    """Collects the reports of a run and writes them at its end."""

    def __init__(self, config: pytest.Config, paths: dict[str, Path]) -> None:
        self._paths = paths
        self._files: dict[str, dict[str, Any]] = {}
        self._costs: dict[str, Any] = {}
        self._entries: dict[str, Any] = {}
        self._calls = 0
        self._command = _command(config)
        try:
            self._documents = {suffix: _begun(path, suffix) for suffix, path in paths.items()}
        except UsageError as error:
            raise pytest.UsageError(str(error)) from error

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fail(report.nodeid, str(report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self._row(report.nodeid)
        row["seconds"] += report.duration
        if report.failed:
            self._fail(report.nodeid, report.longreprtext)
        elif report.skipped:
            row["skipped"] += 1
            row["reasons"][_reason(report)] += 1
        elif report.when == "call":
            row["passed"] += 1
        if report.when == "call":
            for told in (value for name, value in report.user_properties if name == HOST_COST):
                if "entry" in told:
                    self._entries[told["entry"]] = told["times"]
                else:
                    self._costs[told["kernel"]], self._calls = told["times"], told["calls"]

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return  # interrupted, or nothing ran: a part of a file would look like all of it
        for suffix, path in self._paths.items():
            document = self._documents[suffix]
            document["created_at"] = datetime.now(UTC).isoformat(timespec="seconds")
            document["commands"] = list(dict.fromkeys((*document["commands"], self._command)))
            document["commits"] = list(dict.fromkeys((*document.get("commits", ()), source_commit())))
            if suffix == SUITE:
                document["files"] |= self._files
            elif self._costs or self._entries:
                document["calls"] = self._calls or document["calls"]
                document["rows"] |= self._costs
                document["entries"] = document.get("entries", {}) | self._entries
            _write(path, document)

    def _row(self, nodeid: str) -> dict[str, Any]:
        empty: dict[str, Any] = {"passed": 0, "failed": [], "skipped": 0, "reasons": Counter(), "seconds": 0.0}
        return self._files.setdefault(nodeid.partition("::")[0], empty)

    def _fail(self, nodeid: str, message: str) -> None:
        lines = [line for line in message.splitlines() if line.startswith("E ")] or message.splitlines()[-1:]
        said = lines[0].removeprefix("E").strip()[:MESSAGE_CHARACTERS] if lines else ""
        self._row(nodeid)["failed"].append({"test": nodeid, "message": said})


def _reason(report: pytest.TestReport) -> str:
    where = report.longrepr
    return where[2].removeprefix("Skipped: ")[:MESSAGE_CHARACTERS] if isinstance(where, tuple) else "expected to fail"


def _command(config: pytest.Config) -> str:
    """The command without where it was recorded."""
    words = iter(str(argument) for argument in config.invocation_params.args)
    kept = []
    for word in words:
        if word in OPTIONS:
            next(words)
        elif not word.startswith(tuple(f"{option}=" for option in OPTIONS)):
            kept.append(f"'{word}'" if " " in word else word)
    return " ".join(("pytest", *kept))


def _begun(path: Path, suffix: str) -> dict[str, Any]:
    """The document that is added to.

    Raises:
        UsageError: the file has another name or content, or was written on another device or with other software.
    """
    if not path.name.endswith(suffix):
        raise UsageError(f"The record must be named *{suffix}, but got {path}. Rename it.")
    here = _empty(suffix)
    if not path.exists():
        return here
    there = read_run(path)
    if (there["device"], there["environment"]) != (here["device"], here["environment"]):
        raise UsageError(
            f"A record is of one device and software, but {path} is of {there['device']}, {there['environment']}, and "
            f"this is {here['device']}, {here['environment']}. Name another file."
        )
    return there


def _empty(suffix: str) -> dict[str, Any]:
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
        "format": FORMATS[suffix],
        "schema": SCHEMA,
        "device": None if device is None else device.name,
        "environment": environment,
        "created_at": "",
        "commands": [],
    } | ({"files": {}} if suffix == SUITE else {"calls": 0, "rows": {}, "entries": {}})


def _write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    whole.write_text(json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
    whole.replace(path)

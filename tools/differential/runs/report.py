"""What runs have found, as a document: counts, failures with their cases, seeds and environment."""

import json
import math
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from blocktune.kernels.hardware.nvml import driver_version
from blocktune.kernels.values.errors import UsageError
from tools.differential.runs.kinds import kind_of
from tools.differential.truth.verdict import DIFFERENCES, FAILURES, Verdict
from tools.pages.checks.differential_tables import FORMAT, GROUPS, SCHEMA, read_differential

KEPT = 200
"""Kinds of failures that a report holds, and messages of other kinds."""

KEPT_OF_A_KIND = 3
"""Failures of a kind that a report holds in full."""

BINS = 50
"""Of the histogram of errors in parts of their bound."""

MESSAGE_CHARACTERS = 90

Document = dict[str, Any]


class Report:
    """Counts cases as they come in. A report of the same device and software may be added to."""

    def __init__(self, document: Document) -> None:
        self._document = document

    @classmethod
    def begun(cls, path: Path | None, device: str) -> "Report":
        """An empty report, or the one in the file.

        Raises:
            UsageError: the file is no report, or one of another device or software.
        """
        here = {"device": device, "environment": environment()}
        if path is None or not path.exists():
            return cls(_empty() | here)
        found = read_differential(path)
        there = {name: found[name] for name in here}
        if there != here:
            raise UsageError(f"A report is of one device and software, but {path} is of {there}. Name another file.")
        return cls(found)

    @property
    def cases(self) -> int:
        """How many cases were counted."""
        return int(self._document["cases"])

    @property
    def failed(self) -> int:
        """How many of them failed."""
        return sum(self._document["verdicts"].get(str(verdict), 0) for verdict in FAILURES)

    def add(self, record: Mapping[str, Any]) -> bool:
        """Counts one case. Returns whether it is the first failure of its kind."""
        case, verdict = record["case"], Verdict(record["verdict"])
        kind, found = case["kind"], self._document
        found["cases"] += 1
        found["verdicts"][str(verdict)] = found["verdicts"].get(str(verdict), 0) + 1
        values = {"entry": kind["entry"], "dtype": kind["dtype"], "mode": case.get("mode", "eager")}
        values["values"] = case.get("values", "normal")
        for name, value in values.items():
            _count(found["by"][name], value, verdict)
        for kernel in record.get("served", ()):
            _count(found["by"]["kernel"], kernel, verdict)
        for name in ("head_dim", "head_dim_v"):
            if kind[name] not in found[f"{name}s"]:
                found[f"{name}s"].append(kind[name])
        if verdict is Verdict.RIGHT:
            _measure(found["ratios"], kind["dtype"], record.get("ratio", 0.0))
        for said in record.get("failed_launches", ()):
            _note(found["failed_launches"], said.partition(": ")[2], said, case)
        if verdict in FAILURES:
            return self._keep(record)
        if verdict in DIFFERENCES:
            said = record.get("message", "")
            _note(found["differences"], f"{verdict}: {said}", said, case)
        return False

    def _keep(self, record: Mapping[str, Any]) -> bool:
        """Counts a failure among those of its kind, and keeps the first ones. Returns whether it is the first."""
        kinds, kind = self._document.setdefault("kinds", {}), kind_of(record)
        if kind not in kinds and len(kinds) >= KEPT:
            return False
        first = {"count": 0, "cases_before": self.cases} | {name: record.get(name) for name in ("seed", "number")}
        row = kinds.setdefault(kind, first)
        row["count"] += 1
        if row["count"] <= KEPT_OF_A_KIND:
            self._document["failures"].append(dict(record))
        return bool(row["count"] == 1)

    def document(self, run: Mapping[str, Any], problems: list[str]) -> Document:
        """The report with this run: its seed, seconds, jobs and when it was."""
        document = dict(self._document)
        document["runs"] = [*document["runs"], dict(run)]
        document["problems"] = [*document["problems"], *problems]
        return document


def _empty() -> Document:
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "runs": [],
        "cases": 0,
        "verdicts": {},
        "by": {name: {} for name in GROUPS},
        "head_dims": [],
        "head_dim_vs": [],
        "ratios": {},
        "failures": [],
        "kinds": {},
        "differences": {},
        "failed_launches": {},
        "problems": [],
    }


def _count(rows: dict[str, dict[str, int]], value: str, verdict: Verdict) -> None:
    row = rows.setdefault(value, {"cases": 0, "failed": 0})
    row["cases"] += 1
    row["failed"] += verdict in FAILURES


def _measure(rows: dict[str, Any], dtype: str, ratio: float) -> None:
    """Adds the largest error of a case, in parts of its bound, to the histogram of its type."""
    row = rows.setdefault(dtype, {"bins": [0] * BINS, "largest": 0.0})
    row["bins"][min(BINS - 1, math.floor(ratio * BINS))] += 1
    row["largest"] = max(row["largest"], ratio)


def _note(rows: dict[str, Any], kind: str, said: str, case: Mapping[str, Any]) -> None:
    """Counts a message, of which the beginning says the kind, with the first case that it came from."""
    kind = kind[:MESSAGE_CHARACTERS]
    if kind in rows or len(rows) < KEPT:
        rows.setdefault(kind, {"count": 0, "message": said, "case": dict(case)})["count"] += 1


def environment() -> dict[str, str]:
    """Versions of what computes."""
    versions = {name: metadata.version(name) for name in ("torch", "triton", "hypothesis")}
    return versions | {"python": platform.python_version(), "driver": driver_version()}


def write(path: Path, document: Document) -> None:
    """Replaces the file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    whole.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    whole.replace(path)

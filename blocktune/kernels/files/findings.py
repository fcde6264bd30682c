"""Configs that production found to compute wrong results: a private file of JSON lines, which `tune verify` shows."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from blocktune.kernels.files.line_file import append_line, state_directory, stored_lines
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape

logger = logging.getLogger("blocktune")

MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryFinding:
    """times_the_bound: the greatest difference from attention, as a multiple of what rounding explains."""

    shape: AttentionShape
    config: KernelConfig
    times_the_bound: float

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """Return what `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: it did not.
        """
        return cls(
            shape=AttentionShape.from_json(document["shape"]),
            config=KernelConfig.from_json(document["config"]),
            times_the_bound=float(document["times_the_bound"]),
        )

    def to_json(self) -> dict[str, Any]:
        worst = self.times_the_bound if self.times_the_bound < 1e300 else 1e300  # JSON has no infinity
        return {"shape": self.shape.to_json(), "config": self.config.to_json(), "times_the_bound": worst}


def findings_path() -> Path | None:
    """Return where findings are stored; None for a user without a home."""
    state = state_directory()
    return None if state is None else state / "findings.jsonl"


def store_finding(finding: CanaryFinding) -> None:
    """Add a finding to the file. A place that cannot be written costs a line of the log, never a call."""
    path = findings_path()
    try:
        if path is not None:
            append_line(path, json.dumps(finding.to_json()), MAX_BYTES)
    except OSError as error:
        logger.info("A finding is not stored: %s cannot be written (%s).", path, error.strerror)


def stored_findings() -> list[CanaryFinding]:
    """Return what was found so far. Lines that are damaged are passed over, and so is a file that cannot be read."""
    return stored_lines(findings_path(), MAX_BYTES, CanaryFinding.from_json)

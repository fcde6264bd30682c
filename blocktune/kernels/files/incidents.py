"""Incidents: errors of our own code on the way to a kernel. PyTorch computes the call instead.

Each is counted, logged once as a warning, and stored in a private file of JSON lines, which `tune doctor` shows.
"""

import json
import logging
import traceback
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from blocktune.kernels.files.foreign_text import shown
from blocktune.kernels.files.line_file import append_line, state_directory, stored_lines
from blocktune.kernels.values.shape import AttentionShape

logger = logging.getLogger("blocktune")

MAX_BYTES = 1 << 18
_MAX_ERROR = 500

counts: Counter[str] = Counter()
"""How often each error came in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """error: its type, message and place. time: of the first one in a process, in UTC."""

    error: str
    shape: str
    time: str

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """Return what `asdict` gave.

        Raises:
            KeyError, TypeError: it did not.
        """
        return cls(**{name: shown(str(document[name]), _MAX_ERROR) for name in ("error", "shape", "time")})


def incidents_path() -> Path | None:
    """Return where incidents are stored; None for a user without a home."""
    state = state_directory()
    return None if state is None else state / "incidents.jsonl"


def reason_of(error: Exception, shape: AttentionShape) -> str:
    """Count an error that was raised for a shape, report the first of its kind, and return why PyTorch computes."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = shown(f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})", _MAX_ERROR)
    counts[text] += 1
    if counts[text] == 1:
        logger.warning("PyTorch computes %s, since blocktune failed: %s. Please report it.", shape.label, text)
        logger.debug("Where it failed", exc_info=error)
        _store(text, shape)
    return f"blocktune failed: {text}"


def _store(text: str, shape: AttentionShape) -> None:
    """Add an incident to the file. A place that cannot be written costs a line of the log, never a call."""
    time = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        path = incidents_path()
        if path is not None:
            append_line(path, json.dumps(asdict(Incident(error=text, shape=shape.label, time=time))), MAX_BYTES)
    except OSError as error:
        logger.info("An incident is not stored: %s", error)


def stored_incidents() -> list[Incident]:
    """Return what was stored, the oldest first. Damaged lines are passed over, and so is a file that cannot be read."""
    return stored_lines(incidents_path(), MAX_BYTES, Incident.from_json)

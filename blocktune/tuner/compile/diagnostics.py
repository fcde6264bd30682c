"""Messages of a compiler about code that it rejects: its exceptions say no more than that it failed."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blocktune.db.records.records import Outcome
from blocktune.tuner.compile.answers import MAX_ERROR_TEXT

_DIAGNOSTIC = re.compile(r"^(.+?:\d+:\d+): error: (.+)$", re.MULTILINE)


def diagnostics_in(printed: str) -> str:
    """Return the errors in what MLIR has printed, each once, with file and line: `warps.py:136:11: …`."""
    found = (f"{Path(place).name}: {text}" for place, text in _DIAGNOSTIC.findall(printed))
    return "; ".join(dict.fromkeys(found))


def with_diagnostics(answer: Mapping[str, Any], printed: str) -> dict[str, Any]:
    """Return a worker's answer; where the compile has failed, its error says what the compiler has printed, too."""
    said = diagnostics_in(printed) if answer.get("outcome") == Outcome.COMPILE_ERROR else ""
    if not said:
        return dict(answer)
    return {**answer, "error": f"{answer['error']}: {said}"[:MAX_ERROR_TEXT]}

"""The tables of a differential check of speed say what its record holds."""

from pathlib import Path
from typing import Any

import pytest

from blocktune.cli.output.json_files import write_atomically
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.selection.pytorch_rival import FORMAT, SCHEMA
from tools.pages.checks.speed_tables import NOT_RUN, block, tables

CASE: dict[str, Any] = {
    "label": "short b1 h1/1 s7/7 d64", "group": "short", "ours_us": 8.0, "pytorch_us": 10.0, "ratio": 0.8, "error": "",
    "slower": False, "host_slower": True,
}  # fmt: skip
SLOWER = CASE | {"label": "short b1 h1/1 s9/9 d67", "ours_us": 20.0, "ratio": 2.0, "slower": True, "host_slower": False}
RECORD: dict[str, Any] = {
    "format": FORMAT, "schema": SCHEMA, "device": "NVIDIA H200", "torch": "2.11.0", "cases": [CASE, SLOWER],
    "runs": [{"seed": 7, "taken_at": "2026-11-29T10:00:00+00:00", "commit": "abc"}],
}  # fmt: skip


def test_groups_and_slower_calls_are_shown() -> None:
    text = tables(RECORD)
    assert "2 drawn calls" in text
    assert "1 take longer by more than 3 % and 1 us" in text
    assert "| short | 2 | 0.791 | 0.500 | 1 | 1 |" in text
    assert "| short b1 h1/1 s9/9 d67 | 20.0 | 10.0 |" in text


def test_a_file_that_is_missing_or_another_one(tmp_path: Path) -> None:
    path = tmp_path / "x.speed-fuzz.json"
    assert block(path) == NOT_RUN
    write_atomically(path, "{}\n")
    with pytest.raises(UsageError, match="speed"):
        block(path)

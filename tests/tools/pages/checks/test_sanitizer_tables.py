"""The table of a sanitizer run says what its record says."""

import json
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.values.errors import UsageError
from tools.pages.checks.sanitizer_tables import FORMAT, NOT_RUN, block
from tools.pages.pages import with_results


def row(kernel: str, tool: str, errors: int | None, **fields: Any) -> dict[str, Any]:
    """A row of a record."""
    return {"kernel": kernel, "tool": tool, "errors": errors, "exit": 0, "cases": [{}, {}]} | fields


RECORD = {
    "format": FORMAT,
    "schema": 1,
    "device": "NVIDIA H100",
    "environment": {"torch": "2.11.0", "triton": "3.6.0", "driver": ""},
    "created_at": "2026-11-22T10:00:00+00:00",
    "tool_version": "Version 2025.3",
    "rows": [
        row("flash_fwd", "none", None),
        row("flash_fwd", "memcheck", 0, commit="0123456789abcdef"),
        row("flash_fwd_hopper", "memcheck", 3, cases=[{}, {}, {}]),
        row("flash_fwd_hopper", "racecheck", None, exit="timeout", cases=[]),
    ],
}


def test_the_table_counts_what_each_tool_found(tmp_path: Path) -> None:
    place = tmp_path / "h100.sanitizer.json"
    assert block(place) == NOT_RUN
    place.write_text(json.dumps(RECORD))
    lines = block(place).splitlines()
    assert lines[0].startswith("Version 2025.3 of compute-sanitizer on NVIDIA H100, 2026-11-22 (torch 2.11.0,")
    assert lines[0].endswith(" Commit 0123456789.")
    assert lines[2:] == [
        "| kernel | cases | memcheck | racecheck |",
        "| --- | ---: | ---: | ---: |",
        "| `flash_fwd` | 2 | 0 | - |",
        "| `flash_fwd_hopper` | 3 | 3 | exit timeout |",
    ]
    page = f"<!-- results {place.name} -->\nold\n<!-- /results -->"
    assert with_results(page, tmp_path) == page.replace("old", block(place))


def test_another_file_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "h100.sanitizer.json"
    place.write_text(json.dumps(RECORD | {"format": "blocktune-bench"}))
    with pytest.raises(UsageError, match="sanitizer record"):
        block(place)

"""Measurements that are one table."""

import json
from pathlib import Path

import pytest

from blocktune.kernels.values.errors import UsageError
from tools.pages.pages import with_results
from tools.pages.recorded.plain_tables import block

DOCUMENT = {
    "format": "blocktune-table", "schema": 1, "device": "Made-up GPU", "created_at": "2026-11-23T18:00:00+00:00",
    "environment": {"triton": "3.6.0", "torch": "2.11.0"}, "commit": "0123456789abcdef", "how": "Medians of 3 rounds.",
    "columns": ["shape", "ours, µs"], "rows": [["b1 h2", "10.5"]],
}  # fmt: skip


def written(folder: Path, **changed: object) -> Path:
    path = folder / "gpu.soft.table.json"
    path.write_text(json.dumps(DOCUMENT | changed), encoding="utf-8")
    return path


def test_a_page_shows_the_table_and_how_it_was_measured(tmp_path: Path) -> None:
    written(tmp_path)
    page = with_results("<!-- results gpu.soft.table.json -->\n<!-- /results -->", tmp_path)
    assert "Made-up GPU, 2026-11-23 (torch 2.11.0, triton 3.6.0): Medians of 3 rounds. Commit 0123456789." in page
    assert "| b1 h2 | 10.5 |" in page


def test_a_table_of_peers_begins_with_those_that_it_lacks(tmp_path: Path) -> None:
    beside = written(tmp_path, columns=["shape", "ours, µs", "FlashAttention-3, µs"], rows=[["b1 h2", "10.5", "11.0"]])
    assert block(beside).startswith("Measured without cuDNN and FlashAttention-4. Made-up GPU, ")
    among_rows = written(tmp_path, columns=["who", "µs"], rows=[["ours", "10.5"], ["cudnn", "11.0"]])
    assert block(among_rows).startswith("Measured without FlashAttention-3 and FlashAttention-4. Made-up GPU, ")
    assert block(written(tmp_path)).startswith("Made-up GPU, "), "no rival is compared"


def test_a_file_that_is_missing_or_another_is_said(tmp_path: Path) -> None:
    assert "not measured" in block(tmp_path / "gpu.soft.table.json")
    with pytest.raises(UsageError, match="table"):
        block(written(tmp_path, format="another"))

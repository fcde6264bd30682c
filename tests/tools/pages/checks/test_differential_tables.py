"""The tables of a differential check say what its report holds."""

import json
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.values.errors import UsageError
from tools.pages.checks.differential_tables import FORMAT, NOT_RUN, block, read_differential, tables
from tools.pages.pages import with_results

CASE = {"kind": {"entry": "attention", "dtype": "float16", "head_dim": 64, "head_dim_v": 64}, "seed": 7}
REPORT: dict[str, Any] = {
    "format": FORMAT,
    "schema": 1,
    "device": "NVIDIA H100",
    "environment": {"torch": "2.11.0", "triton": "3.6.0", "driver": ""},
    "runs": [
        {"seed": 1, "seconds": 100.4, "jobs": 16, "created_at": "2026-11-22T10:00:00+00:00"},
        {"seed": 2, "seconds": 200.0, "jobs": 16, "created_at": "2026-11-23T10:00:00+00:00"},
    ],
    "cases": 400,
    "verdicts": {"right": 390, "other_error": 6, "inherited": 3, "wrong": 1},
    "by": {
        "entry": {"attention": {"cases": 300, "failed": 1}, "flash_attn_func": {"cases": 100, "failed": 0}},
        "dtype": {"float16": {"cases": 400, "failed": 1}},
        "mode": {"eager": {"cases": 100, "failed": 1}, "graph": {"cases": 300, "failed": 0}},
        "values": {"normal": {"cases": 400, "failed": 1}},
        "kernel": {"flash_fwd": {"cases": 400, "failed": 1}},
    },
    "head_dims": [1, 2, 64],
    "head_dim_vs": [1, 64],
    "ratios": {"float16": {"bins": [300, 90, 9, 1, 0], "largest": 0.71}},
    "failures": [{"case": CASE, "verdict": "wrong", "comparisons": [{"name": "q", "ratio": 7.5}]}],
    "kinds": {
        "wrong attention, gradients, q": {"count": 1, "seed": 1, "number": 3007, "cases_before": 300},
        "raised: a|b": {"count": 4, "seed": 2, "number": 12, "cases_before": 13},
    },
    "differences": {},
    "failed_launches": {"x": {"count": 3, "message": "d64: flash_fwd <a|b> does not launch", "case": CASE}},
    "problems": [],
}


def test_the_tables_say_what_ran_and_what_failed() -> None:
    text = tables(REPORT)
    lines = text.splitlines()
    assert lines[0].startswith(
        "Run on NVIDIA H100 on 2026-11-23 (torch 2.11.0, triton 3.6.0) with seed 1, 2, in 300 s by"
    )
    assert "400 cases of 3 values of head_dim and 2 of head_dim_v. Right: 390; refused, with another" in lines[0]
    assert lines[0].endswith("wrong: 1.")
    assert "| `float16` | up to 0.20 | up to 0.40 | up to 0.60 | 0.71 |" in lines
    assert lines.index("| `graph` | 300 | 0 |") < lines.index("| `eager` | 100 | 1 |")
    failed = lines[lines.index("Failed:") + 2 :]
    assert failed[0].startswith("- 4 times: raised: a\\|b (`--seed 2 --case 12`")
    assert failed[1].startswith("- 1 times: wrong attention, gradients, q (`--seed 1")
    assert any(line.endswith("(`--seed 1 --case 3007`, found after 300 cases)") for line in lines)
    assert "- 3: d64: flash_fwd &lt;a\\|b> does not launch" in lines


def test_the_commits_of_all_runs_are_named() -> None:
    first, second = REPORT["runs"]
    runs = [first | {"commit": "0123456789abcdef"}, second | {"commit": "fedcba9876543210+"}, second]
    assert tables(REPORT | {"runs": runs}).splitlines()[0].endswith("wrong: 1. Commit 0123456789 and fedcba9876+.")


def test_many_kinds_of_failures_are_counted() -> None:
    row = REPORT["kinds"]["raised: a|b"]
    text = tables(REPORT | {"kinds": {f"raised: {number}": row for number in range(25)}})
    assert text.count("- 4 times: raised") == 20
    assert "- and 5 kinds more" in text


def test_a_check_without_failures_lists_none() -> None:
    text = tables(REPORT | {"failures": [], "failed_launches": {}})
    assert "Failed:" not in text
    assert "did not launch" not in text


def test_pages_show_a_check_or_how_to_make_one(tmp_path: Path) -> None:
    page = "<!-- results a.differential.json -->\nold\n<!-- /results -->\n"
    assert with_results(page, tmp_path) == page.replace("old", NOT_RUN)
    (tmp_path / "a.differential.json").write_text(json.dumps(REPORT))
    assert with_results(page, tmp_path) == page.replace("old", tables(REPORT))


@pytest.mark.parametrize("document", ["{", "[]", {"format": FORMAT, "schema": 0}])
def test_other_files_are_no_checks(document: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.differential.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(UsageError, match=r"is not (JSON|a differential check file)"):
        block(file)
    with pytest.raises(UsageError, match=r"is not (JSON|a differential check file)"):
        read_differential(file)

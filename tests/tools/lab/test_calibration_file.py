"""The table of head dimensions that were left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.files.variables import COMMIT
from blocktune.kernels.values.errors import UsageError
from tests.tuner.lab.test_replay import sweep
from tools.lab.calibration_file import NOT_FITTED, block, calibration_document
from tools.pages.pages import with_results


def ranking(kind: str, kernel: str | None, correlation: float) -> dict[str, Any]:
    """A row of the model's ranking."""
    spread = {"median": 0.01, "low": 0.0, "high": 0.02}
    names = ("first_choice", "best_of_8", "shared_error_bytes", "register_error")
    ranks = {"rank_correlation": {"median": correlation, "low": 0.5, "high": 1.0}}
    return {"kind": kind, "kernel": kernel, "sweeps": 2} | dict.fromkeys(names, spread) | ranks


def test_what_was_left_out_is_judged_with_both_constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMIT.name, "c0ffee")
    place = tmp_path / "h200.calibration.json"
    assert block(place) == NOT_FITTED
    judged = {
        "head_dim": 64,
        "fitted": [ranking("forward", None, 0.9), ranking("forward", "flash_fwd", 0.1)],
        "as_it_is": [ranking("forward", None, 0.95)],
    }
    document = calibration_document([sweep()], [judged])
    assert (document["commit"], document["sweeps"]) == ("c0ffee", [sweep().label])
    place.write_text(json.dumps(document), encoding="utf-8")
    lines = block(place).splitlines()
    assert lines[0].startswith("1 sweeps, every config")
    assert lines[4:] == [
        "| 64, forward | fitted to the others | 2 | 0.90 (0.50) | 1.0 % (2.0 %) | 1.0 % (2.0 %) |",
        "| 64, forward | as they are | 2 | 0.95 (0.50) | 1.0 % (2.0 %) | 1.0 % (2.0 %) |",
    ]
    page = f"<!-- results {place.name} -->\nold\n<!-- /results -->"
    assert with_results(page, tmp_path) == page.replace("old", block(place))


def test_another_file_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "h200.calibration.json"
    place.write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="calibration"):
        block(place)

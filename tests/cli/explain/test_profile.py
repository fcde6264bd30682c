"""`tune profile`: counters of a file next to predictions, and the instructions of a loop."""

import json
from pathlib import Path

import pytest

from blocktune.tuner.profile.counters import TIME, Counters
from tests.support.models.counters import raw_page

CONFIG = ("--seq", 4096, "--dim", 64, "--batch", 2, "--heads", 32, "--device", "h200", "--kernel", "flash_fwd")
TILE = ("--block-m", 128, "--block-n", 64, "--warps", 4, "--stages", 2)
CSV = raw_page(
    [
        (
            "flash_fwd_kernel",
            {
                TIME: ("us", "500"),
                "l1tex__m_xbar2l1tex_read_bytes.sum": ("byte", "2,181,000,000"),
                "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": ("inst", "3"),
                "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": ("inst", "1"),
            },
        )
    ]
)


@pytest.fixture
def counters(tmp_path: Path) -> Path:
    path = tmp_path / "counters.csv"
    path.write_text(CSV)
    return path


pytestmark = pytest.mark.compiles_kernels


def test_a_csv_stands_next_to_the_predictions(tune, counters: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.csv"
    result = tune("profile", *CONFIG, *TILE, "--from", counters, "--out", kept)
    assert result.exit_code == 0, result.output
    cells = {" ".join(line.split()[:3]): line for line in result.stdout.splitlines()}
    assert "2,181.0 MB" in cells["L2 to multiprocessors"]
    assert "1.00" in cells["L2 to multiprocessors"].split()
    assert any(line.split()[:4] == ["gmma", "3.00", "75", "%"] for line in result.stdout.splitlines())
    assert "Counted: flash_fwd_kernel" in result.stdout
    assert Counters.parse(kept.read_text()) == Counters.parse(CSV)
    assert kept.read_text().splitlines()[1].startswith('"ID"')  # without what the program printed


def test_the_json_has_rows_stalls_launches_and_instructions(tune, counters: Path) -> None:
    result = tune("profile", *CONFIG, *TILE, "--from", counters, "--sass", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert {row["name"]: row["counted"] for row in data["rows"] if row["counted"] is not None} == {
        "time": 500.0,
        "L2 to multiprocessors": 2.181e9,
    }
    assert [stall["reason"] for stall in data["stalls"]] == ["gmma", "wait"]
    assert data["launches"][0]["metrics"][TIME] == 500.0
    assert data["instructions"]["loop"]["tensor"] == 16


def test_instructions_alone_need_no_gpu(tune) -> None:
    result = tune("profile", *CONFIG, *TILE, "--sass")
    assert result.exit_code == 0, result.output
    assert "instructions of a warp" in result.stdout
    assert "predicted" not in result.stdout
    assert "without counters: NVIDIA H200 is not in this machine" in result.stderr


def test_counters_of_a_device_that_is_elsewhere_need_a_file(tune, tmp_path: Path) -> None:
    for words in ((), ("--sass", "--out", tmp_path / "a.csv")):
        result = tune("profile", *CONFIG, *TILE, *words)
        assert result.exit_code == 4
        assert "--from counters.csv" in result.stderr


def test_a_file_without_counters_is_refused(tune, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("no counters")
    result = tune("profile", *CONFIG, *TILE, "--from", tmp_path / "a.csv")
    assert result.exit_code == 2
    assert 'its first column is not "ID"' in result.stderr


def test_names_of_foreign_kernels_are_inert(tune, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(raw_page([("k\x1b]0;owned\x07", {TIME: ("us", "1")})]))
    result = tune("profile", *CONFIG, *TILE, "--from", tmp_path / "a.csv")
    assert result.exit_code == 0, result.output
    assert "Counted: k" in result.stdout
    assert "\x1b" not in result.stdout


def test_kept_counters_are_shown_for_the_config_that_they_are_of_alone(tune, counters: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.counters.csv"
    assert tune("profile", *CONFIG, *TILE, "--from", counters, "--out", kept).exit_code == 0
    assert tune("profile", *CONFIG, *TILE, "--from", kept).exit_code == 0
    result = tune("profile", *CONFIG, *TILE, "--stages", 3, "--from", kept)
    assert result.exit_code == 2
    message = " ".join(result.stderr.split())
    assert "are of flash_fwd 128x64 w4 s2" in message
    assert "the flags name flash_fwd 128x64 w4 s3" in message

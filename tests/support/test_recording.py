"""A run of the tests is written down, and the tables say what the record says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.files.variables import COMMIT
from blocktune.kernels.values.errors import UsageError
from tools import ROOT
from tools.pages.checks.gpu_test_tables import COSTS_COLUMNS, block, read_run
from tools.pages.pages import with_results

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_good(number, record_property):
    times = {"look_up": {"median_us": 1.25, "p99_us": 3.0}, "sdpa": {"median_us": 12.0, "p99_us": 20.0}}
    record_property("host_cost", {"kernel": f"kernel_{number}", "calls": 100, "times": times})

@pytest.mark.parametrize("entry", ["forward", "decode"])
def test_entry(entry, record_property):
    times = {"ours": {"median_us": 20.0, "p99_us": 30.0}}
    if entry == "forward":
        times = {"ours": {"median_us": 15.0, "p99_us": 20.0}, "sdpa": {"median_us": 20.0, "p99_us": 30.0}}
    record_property("host_cost", {"entry": entry, "times": times})

def test_skipped():
    pytest.skip("no <GPU>")
"""
BAD = "def test_bad():\n    assert 1 == 2, 'a | b'\n"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-c",
        "pytest.ini",
        "-p",
        "tests.support.recording",
        "-p",
        "no:cacheprovider",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), COMMIT.name: "c0ffee"}
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which tests were run and recorded, in two parts."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_one.py").write_text(TESTS)
    (folder / "test_two.py").write_text(BAD)
    where = ("--record", "a.gpu-tests.json", "--record-costs=a.host-cost.json")
    first = run(folder, *where)
    assert first.returncode == 1, first.stdout + first.stderr
    (folder / "test_two.py").write_text(BAD + "def test_other(): pass\n")
    second = run(folder, *where, "test_two.py")
    assert second.returncode == 1, second.stdout + second.stderr
    return folder


def test_the_record_names_what_ran(recorded: Path) -> None:
    suite = read_run(recorded / "a.gpu-tests.json")
    assert set(suite["environment"]) == {"torch", "triton", "python", "ptxas", "driver"}
    assert suite["commands"][1].endswith(" test_two.py")
    assert suite["commits"] == ["c0ffee"]
    assert not any("--record" in command for command in suite["commands"])
    one, two = suite["files"]["test_one.py"], suite["files"]["test_two.py"]
    assert (one["passed"], one["failed"], one["skipped"], one["reasons"]) == (5, [], 1, {"no <GPU>": 1})
    assert (two["passed"], [failure["test"] for failure in two["failed"]]) == (1, ["test_two.py::test_bad"])
    assert "assert 1 == 2" in two["failed"][0]["message"] or "a | b" in two["failed"][0]["message"]
    costs = read_run(recorded / "a.host-cost.json")
    assert (costs["calls"], sorted(costs["rows"])) == (100, ["kernel_0", "kernel_1", "kernel_2"])


def test_a_record_of_other_software_is_not_added_to(recorded: Path) -> None:
    document = read_run(recorded / "a.gpu-tests.json")
    document["environment"]["torch"] = "1.0"
    other = recorded / "other.gpu-tests.json"
    other.write_text(json.dumps(document))
    refused = run(recorded, "--record", other.name)
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR
    assert "one device and software" in refused.stderr
    assert read_run(other) == document


def test_tables_of_a_run(recorded: Path) -> None:
    lines = block(recorded / "a.gpu-tests.json").splitlines()
    assert "6 tests passed, 1 failed, 1 were skipped" in lines[0]
    assert lines[0].endswith(" Commit c0ffee.")
    assert any(line.startswith("| `test_two.py` | 1 | 1 | 0 |") for line in lines)
    assert any(line.startswith("| all | 6 | 1 | 1 |") for line in lines)
    assert any(line.startswith("- `test_two.py::test_bad`: ") and "|" not in line.replace("\\|", "") for line in lines)
    assert "- 1: no &lt;GPU>" in lines
    table = block(recorded / "a.host-cost.json").splitlines()
    assert table[2] == f"| kernel | {' | '.join(COSTS_COLUMNS.values())} |"
    assert table[4] == "| `kernel_0` | 1.2 (3.0) | - | - | - | - | 12.0 (20.0) |"
    assert table[-2:] == ["| decode | 20.0 (30.0) | - | - |", "| forward | 15.0 (20.0) | 20.0 (30.0) | 0.75 |"]


def test_pages_show_nothing_of_a_run_that_there_is_not(recorded: Path) -> None:
    page = "<!-- results {name} -->\nold\n<!-- /results -->\n"
    for name in ("a.gpu-tests.json", "a.host-cost.json"):
        assert with_results(page.format(name=name), recorded) == page.format(name=name).replace(
            "old", block(recorded / name)
        )
        missing = page.format(name=f"b.{name}")
        assert with_results(missing, recorded) == missing.replace("old", "")


@pytest.mark.parametrize("document", ["{", "[]", {"format": "blocktune-bench", "schema": 1}])
def test_other_files_are_no_records(document: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.gpu-tests.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(UsageError, match=r"is not JSON|recorded run"):
        block(file)

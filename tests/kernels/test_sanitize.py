"""The program that runs every kernel under a checker, with a checker that only writes what a real one would."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import KERNELS, get_kernel
from blocktune.kernels.values.features import Features
from blocktune.tuner.correctness import small_shapes
from tools.checks import sanitize, sanitizer_case

pytestmark = pytest.mark.triton_free

HOPPER = limits_for((9, 0))
INTERPRETED = ("--device=cpu", "--dtype=float32", "--first=1")
CHECKER = """#!{python}
import subprocess, sys
if sys.argv[1:] == ["--version"]:
    print("NVIDIA (R) Compute Sanitizer\\nVersion 2025.1.0.0 (build 1) (public-release)")
    sys.exit()
tool, log = sys.argv[2], sys.argv[4]
case = sys.argv[sys.argv.index("-P") - 1 :]
code = subprocess.run(case).returncode
with open(log, "w") as file:
    file.write({told!r}.replace("TOOL", tool))
sys.exit(code)
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
INVALID = (
    "========= COMPUTE-SANITIZER\n========= Invalid __shared__ write of size 16 bytes\n"
    "=========     at flash_fwd_kernel+0x10\n========= ERROR SUMMARY: 3 errors\n"
)
RACES = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n"

MakeChecker = Callable[[str], sanitize.Checker]


@pytest.fixture
def checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeChecker:
    """Makes a checker that runs the case on the CPU and then says the given text."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def make(told: str) -> sanitize.Checker:
        program = tmp_path / "checker"
        program.write_text(CHECKER.format(python=sys.executable, told=told))
        program.chmod(0o755)
        return sanitize.Checker(str(program), (), 120.0)

    return make


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_has_small_cases_that_its_default_config_serves_on_hopper(name: str) -> None:
    kernel = get_kernel(name)
    shapes = small_shapes.small_shapes(kernel, HOPPER, "bfloat16")
    served = set().union(*(shape.features.names for shape in shapes))
    assert served >= kernel.features
    least = 1 if name == "flash_decode8_ring" else 2  # it takes 128 columns alone
    assert len({(shape.head_dim, shape.head_dim_v) for shape in shapes}) >= least
    for shape in shapes:
        assert kernel.violations(kernel.default_config(shape, HOPPER), shape, HOPPER) == ()


def test_a_kernel_without_a_device_for_it_has_no_case() -> None:
    assert small_shapes.small_shapes(get_kernel("flash_fwd_hopper"), limits_for((8, 0)), "bfloat16") == []


def test_a_case_says_what_ran(checker: MakeChecker) -> None:
    row = sanitize.check(checker(CLEAN), "flash_fwd", "memcheck", INTERPRETED)
    assert row["exit"] == 0, row["complaint"]
    assert (row["kernel"], row["tool"], row["errors"], row["messages"]) == ("flash_fwd", "memcheck", 0, [])
    (case,) = row["cases"]
    assert (case["shape"], case["problem"]) == ("b2 h4/2 s160/300 d64 fp32 causal-lower-right", "")
    assert case["config"] == "flash_fwd 128x64 w8 s2 schedule=0"
    assert sanitize.is_clean(row)


@pytest.mark.parametrize(("told", "errors", "warnings"), [(INVALID, 3, 0), (RACES, 1, 2), ("", None, 0)])
def test_what_the_tool_found_is_counted(
    checker: MakeChecker, told: str, errors: int | None, warnings: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sanitize, "CASE", _script(tmp_path, "print('{}')"))
    row = sanitize.check(checker(told), "flash_fwd", "memcheck", [])
    assert (row["errors"], row["warnings"], row["exit"]) == (errors, warnings, 0)
    assert row["messages"] == (["Invalid __shared__ write of size 16 bytes"] if told == INVALID else [])
    assert not sanitize.is_clean(row)


def test_a_case_that_dies_or_hangs_is_a_row_not_an_exception(
    checker: MakeChecker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sanitize, "CASE", _script(tmp_path, "import sys; sys.exit('CUDA error: misaligned address')"))
    row = sanitize.check(checker(CLEAN), "flash_v1", sanitize.NO_TOOL, [])
    assert (row["exit"], row["complaint"], row["cases"]) == (1, "CUDA error: misaligned address", [])
    monkeypatch.setattr(sanitize, "CASE", _script(tmp_path, "import time; time.sleep(60)"))
    row = sanitize.check(sanitize.Checker("none", (), 0.5), "flash_v1", sanitize.NO_TOOL, [])
    assert row["exit"] == "timeout"
    assert not sanitize.is_clean(row)


def _script(folder: Path, text: str) -> Path:
    script = folder / "case.py"
    script.write_text(text)
    return script


def test_results_that_are_not_finite_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = get_kernel("flash_fwd")
    shape = small_shapes.small_shapes(kernel, HOPPER, "bfloat16")[0]
    monkeypatch.setattr(type(kernel), "bind", lambda *_: lambda *_: None)  # writes nothing
    row = sanitizer_case.run(kernel, shape, HOPPER, "cpu")
    assert row["problem"] == "81920 of 81920 values are not finite"


def test_a_record_is_added_to_and_what_ran_again_replaces_what_was_known(tmp_path: Path) -> None:
    path = tmp_path / "here.sanitizer.json"
    row: dict[str, Any] = {"kernel": "flash_v1", "tool": "memcheck", "errors": 1}
    sanitize.record(path, "1.0", [row, row | {"kernel": "flash_fwd"}])
    sanitize.record(path, "2.0", [row | {"errors": 0}])
    document = json.loads(path.read_text())
    assert [(each["kernel"], each["errors"]) for each in document["rows"]] == [("flash_fwd", 1), ("flash_v1", 0)]
    assert document["tool_version"] == "2.0"
    path.write_text(json.dumps(document | {"device": "another GPU"}))
    with pytest.raises(sanitize.UsageError, match="A record is of one device and software"):
        sanitize.record(path, "2.0", [row])


def test_the_plan_runs_races_where_threads_share_memory_by_barriers() -> None:
    assert list(sanitize.plan(["flash_v1"], ())) == [("flash_v1", "none"), ("flash_v1", "memcheck")]
    assert [tool for _, tool in sanitize.plan(["flash_fwd_hopper"], ())] == ["none", "memcheck", "racecheck"]
    assert [tool for _, tool in sanitize.plan(["flash_v1"], ["racecheck"])] == ["none", "racecheck"]


@pytest.mark.exhaustive
def test_all_of_it_runs_from_the_command_line(checker: MakeChecker, tmp_path: Path) -> None:
    program, path = checker(CLEAN).program, tmp_path / "here.sanitizer.json"
    arguments = ["--record", str(path), "--sanitizer", program, "--kernel", "flash_v1"]
    arguments += [f"--case={argument}" for argument in INTERPRETED]
    done = _command(sanitize, *arguments)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["flash_v1", "none"], ["flash_v1", "memcheck"]]
    document = json.loads(path.read_text())
    assert document["tool_version"] == "Version 2025.1.0.0 (build 1) (public-release)"
    assert [row["errors"] for row in document["rows"]] == [0, None]


def test_a_checker_that_is_not_there_is_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, absent = str(tmp_path / "x.sanitizer.json"), str(tmp_path / "absent")
    assert sanitize.main(["--record", record, "--sanitizer", absent]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "No such checker" in err
    assert "name it with --sanitizer" in err


def test_the_record_is_named_for_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sanitize.parse(["--record", "results/h100.json"])
    assert "The record must be named *.sanitizer.json" in capsys.readouterr().err


def _command(module: ModuleType, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(module.__file__), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_features_that_a_case_names_can_be_parsed() -> None:
    for word in (*small_shapes.LABELS.values(), *small_shapes.BASES):
        assert Features.parse(word).label == word

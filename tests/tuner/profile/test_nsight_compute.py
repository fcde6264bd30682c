"""How Nsight Compute is run, with a program of its name that answers as it does."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoDeviceError, UsageError
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.profile.comparison import METRICS
from blocktune.tuner.profile.counters import TIME, Counters
from blocktune.tuner.profile.nsight_compute import read_counters, record_command, record_counters
from tests.support.models.counters import raw_page

pytestmark = pytest.mark.triton_free

SHAPE = complete_shape(1024, 64)
CONFIG = get_kernel("flash_fwd").default_config(SHAPE, device_named("h200").limits)
CSV = raw_page([("flash_fwd_kernel", {TIME: ("ns", "1,000")})])


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: int = 0) -> Path:
    """Put a program `ncu` first on the PATH that says this, and return the file that it writes its arguments to."""
    told = folder / "arguments.json"
    program = folder / "ncu"
    program.write_text(
        f"#!{sys.executable}\nimport json, pathlib, sys\n"
        f"pathlib.Path({str(told)!r}).write_text(json.dumps(sys.argv[1:]))\n"
        f"print({said!r}, end='')\nsys.exit({code})\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return told


def test_a_config_is_launched_with_the_metrics_and_the_clock_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = install(tmp_path, monkeypatch, CSV)
    assert Counters.parse(record_counters(SHAPE, CONFIG)).total(TIME) == 1.0
    arguments = json.loads(told.read_text())
    assert tuple(arguments[arguments.index("--metrics") + 1].split(",")) == METRICS
    assert arguments[arguments.index("--clock-control") + 1] == "none"
    assert arguments[-2] == "blocktune.tuner.profile.target"
    task = json.loads(arguments[-1])
    assert AttentionShape.from_json(task["shape"]) == SHAPE
    assert KernelConfig.from_json(task["config"]) == CONFIG


def test_a_report_is_imported_and_a_csv_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = install(tmp_path, monkeypatch, CSV)
    (tmp_path / "a.csv").write_text(CSV)
    assert read_counters(tmp_path / "a.csv") == CSV
    assert not told.exists()
    assert read_counters(tmp_path / "a.ncu-rep") == CSV
    assert json.loads(told.read_text())[:2] == ["--import", str(tmp_path / "a.ncu-rep")]


def test_without_ncu_the_way_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for read in (lambda: record_counters(SHAPE, CONFIG), lambda: read_counters(tmp_path / "a.ncu-rep")):
        with pytest.raises(NoDeviceError, match=r"`ncu` is not on the PATH.*--from counters\.csv"):
            read()


def test_a_driver_that_refuses_counters_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", code=1)
    with pytest.raises(NoDeviceError, match=r"https://developer\.nvidia\.com/ERR_NVGPUCTRPERM"):
        record_counters(SHAPE, CONFIG)


def test_a_failure_is_told_with_what_ncu_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "==ERROR== Failed to find metric colour\n", code=9)
    with pytest.raises(UsageError, match=r"failed with exit status 9: ==ERROR== Failed to find metric colour"):
        record_counters(SHAPE, CONFIG)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.csv", "binary.csv"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_counters(tmp_path / name)


def test_shapes_with_features_have_no_made_up_inputs() -> None:
    shape = replace(SHAPE, features=Features.parse("softcap"))
    with pytest.raises(UsageError, match="Only plain attention can be profiled"):
        record_command(shape, CONFIG)

"""The short answer of `tune run` and `tune best`: six lines that say what a call gets."""

from dataclasses import replace

import pytest

from blocktune.cli.output.winners import winner_rows
from blocktune.cli.shared import summary
from blocktune.kernels.hardware import device
from blocktune.kernels.values.config import Origin
from blocktune.tuner.cost.bands import predicted_text

SHAPE = ("best", "--seq", 8192, "--dim", 64, "--device", "h200")
NAMES = ["GPU", "shape", "config", "time", "compared", "next"]


@pytest.fixture(autouse=True)
def _nothing_here_and_nothing_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "present_devices", tuple)
    monkeypatch.setattr("blocktune.runtime.store_reader.sources.shipped_rows", lambda: iter(()))
    monkeypatch.setattr("blocktune.cli.shared.lookup.shipped_winners", lambda: iter(()))
    monkeypatch.setattr("blocktune.runtime.selection.untuned.shipped_correction", lambda key: None)


def six_lines(text: str) -> dict[str, str]:
    """The lines of an answer by their names, of which there are six."""
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert list(lines) == NAMES
    return lines


def test_a_measured_winner_is_six_lines(tune, winner) -> None:
    tune.store(winner())
    lines = six_lines(tune(*SHAPE).stdout)
    assert lines["GPU"] == "none here: this is for NVIDIA H200"
    assert lines["shape"].startswith("b2 h32 s8192 d64 bf16; assumed --batch 2")
    assert lines["config"] == winner().config.label
    assert lines["time"].startswith("812.5 µs, measured sustained on 2026-11-20; measured on this device")
    assert lines["compared"] == "1.200x (1.190 to 1.210) the speed of the default"
    assert lines["next"].startswith("`tune explain --seq 8192 --dim 64")


def test_a_default_that_wins_is_called_that_and_not_one_times_as_fast(tune, winner) -> None:
    best = winner()
    tune.store(winner(config=best.default, time_us=best.default_time_us, speedup_over_default=1.0))
    short, long, listed = tune(*SHAPE).stdout, tune(*SHAPE, "-v").stdout, tune("list").stdout
    assert six_lines(short)["compared"] == f"{summary.DEFAULT_WINS}; nothing measured is faster"
    assert "1.000x" not in short + long + listed
    assert "is the default" in long
    assert "is the default" in listed


def test_a_prediction_is_no_promise(tune, winner) -> None:
    unmeasured = {"time_us": None, "default_time_us": None, "paper_time_us": None, "speedup_over_default": None}
    tune.store(winner(origin=Origin.PREDICTED, **unmeasured))
    lines, time = six_lines(tune(*SHAPE).stdout), predicted_text(790.0, "flash_fwd", winner().shape, winner().device)
    assert lines["time"].startswith(f"{time}, by the cost model, not measured")
    assert "x the speed" not in lines["compared"]


def test_a_device_that_was_never_measured_is_unchecked_and_has_no_speed(winner, capsys) -> None:
    unmeasured = {"time_us": None, "default_time_us": None, "paper_time_us": None, "speedup_over_default": None}
    found = winner(origin=Origin.PREDICTED, device=device.device_named("a100"), **unmeasured)
    predicted = {found.default: 900.0, found.paper: 950.0}
    rows = winner_rows(found, predicted)
    assert [row[4] for row in rows] == [f"{time}.0 µs, unchecked device" for time in (790, 900, 950)]
    assert {row[5] for row in rows} == {"-"}
    summary.show_winner(found, predicted)
    lines = six_lines(capsys.readouterr().out)
    assert lines["time"].startswith("790.0 µs, unchecked device, by the cost model")
    assert lines["compared"].startswith("no speed over the default is claimed")


def test_a_predicted_speed_has_the_bands_of_both(winner, capsys) -> None:
    found = winner(origin=Origin.PREDICTED, time_us=None, default_time_us=None, speedup_over_default=None)
    summary.show_winner(found, {found.default: 948.0})
    assert six_lines(capsys.readouterr().out)["compared"].startswith("1.20x the speed of the default by the cost model")


def test_where_a_call_gets_pytorch_s_kernel_that_is_the_config(tune) -> None:
    lines = six_lines(tune("best", "--seq", 4096, "--dim", 128, "--device", "l40s").stdout)
    assert lines["config"].startswith("PyTorch's attention; the best known of ours is flash_fwd ")
    assert "no kernel was measured on such a device" in lines["compared"]
    none = tune("best", "--seq", 64, "--dim", 1024, "--device", "h200")
    assert (none.exit_code, six_lines(none.stdout)["config"]) == (3, "PyTorch's scaled_dot_product_attention")


def test_a_gpu_that_is_here_is_compared_next(tune, winner, monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(device.device_named("h200"), uuid="GPU-1", source="driver")
    monkeypatch.setattr(device, "present_devices", lambda: (here,))
    tune.store(winner())
    lines = six_lines(tune(*SHAPE[:-2]).stdout)
    assert lines["GPU"] == "NVIDIA H200"
    assert lines["next"].startswith("`tune bench --seq 8192 --dim 64 ")
    other = six_lines(tune("best", "--seq", 8192, "--dim", 64, "--device", "a100").stdout)
    assert other["GPU"] == "another one here: this is for NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("name", "dtype", "said"), [("t4", "bf16", True), ("t4", "fp16", False), ("a100", "bf16", False)]
)
def test_a_gpu_without_units_for_bf16_is_called_that(tune, name: str, dtype: str, said: bool) -> None:
    lines = six_lines(tune("best", "--seq", 4096, "--dim", 64, "--device", name, "--dtype", dtype).stdout)
    assert ("this GPU has no units for bf16" in lines["shape"]) is said

"""`tune ladder`: its table, its words, its JSON, its file, and the page that is made of it."""

import json
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.cli.explain.ladder import _command
from blocktune.cli.explain.ladder_file import LadderFile, read_ladder
from blocktune.db.records.records import Environment, Outcome
from blocktune.kernels.files.variables import COMMIT
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.compare.ladder import Ladder, climb
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses
from tools.pages.pages import NO_LADDER, with_results
from tools.pages.searches.ladder_tables import ladder_tables

LADDER = ("ladder", "--seq", 8192, "--dim", 64, "--device", "h200")
ENVIRONMENT = Environment(triton="3.6.0", ptxas="12.8", torch="2.13")


class FakeFarm:
    """Compiles nothing."""

    def __init__(self, **_: Any) -> None:
        pass

    def __enter__(self) -> "FakeFarm":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, kernel: str, config: Any, shape: Any, cc: Any) -> "Future[CompileResult]":
        warps = get_kernel(kernel).total_warps(config)
        resources = KernelResources(
            registers=1920 // max(16, warps), shared_bytes=40_000, num_warps=warps, tensor_cores="wgmma"
        )
        future: Future[CompileResult] = Future()
        future.set_result(CompileResult(config=config, outcome=Outcome.OK, resources=resources))
        return future


@pytest.fixture(autouse=True)
def _nothing_is_shipped_or_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktune.runtime.store_reader.sources.shipped_rows", lambda: iter(()))
    monkeypatch.setattr("blocktune.runtime.selection.untuned.shipped_correction", lambda key: None)
    monkeypatch.setattr("blocktune.cli.shared.lookup.shipped_winners", lambda: iter(()))
    monkeypatch.setattr("blocktune.tuner.compile_server.farm.CompileFarm", FakeFarm)
    monkeypatch.setattr("blocktune.tuner.measure.environment.ptxas_version", lambda cc: "12.8")


def test_without_a_gpu_every_step_is_predicted_and_explained(tune) -> None:
    result = tune(*LADDER)
    assert result.exit_code == 0, result.output
    for part in (
        "b2 h32 s8192 d64 bf16 on NVIDIA H200, predicted by the models, nothing was measured",
        "standard",
        "flash_v1 64x64",
        "flash_fwd_padded",
        "flash_fwd_transposed",
        "flash_fwd_hopper",
        "44.5 GB",
        "v2: loops exchanged",
        "By the models: device memory:",
    ):
        assert part in result.stdout
    assert "assumed --batch 2" in result.stderr


def test_json_holds_every_step_and_its_origin(tune) -> None:
    data = json.loads(tune(*LADDER, "--causal", "--json").stdout)
    assert (data["schema"], data["origin"], data["shape"]["causal"]) == (1, "predicted", "upper_left")
    assert [step["name"] for step in data["steps"]] == [
        "standard", "chunked", "efficient", "v1", "paper", "v2", "padded", "transposed", "tuned", "hopper"
    ]  # fmt: skip
    assert all(step["problem"] == "" and step["predicted_us"] > 0 for step in data["steps"][3:])


def test_a_stored_winner_is_what_the_tuned_step_takes(tune, winner) -> None:
    tune.store(winner())
    data = json.loads(tune(*LADDER, "--json").stdout)
    steps = {step["name"]: step for step in data["steps"]}
    assert steps["tuned"]["config"] == winner().config.to_json()


def test_a_preset_has_a_shape_a_device_blocks_and_kernels_of_its_own(tune) -> None:
    result = tune("ladder", "--preset", "rtx2070")
    assert result.exit_code == 0, result.output
    assert "b10 h64 s1024 d32 fp32 on NVIDIA GeForce RTX 2070, predicted by the models" in result.stdout
    assert "rows of 128 bytes begin in the same bank" in result.stdout
    data = json.loads(tune("ladder", "--preset", "rtx2070", "--json").stdout)
    steps = {step["name"]: step for step in data["steps"]}
    assert steps["v2"]["config"]["kernel"] == "flash_v2"
    for name in ("v1", "v2", "padded", "transposed"):
        assert (steps[name]["config"]["block_m"], steps[name]["config"]["block_n"]) == (32, 32)
    assert steps["v2"]["grid_blocks"] == 20_480
    times = {name: step["predicted_us"] for name, step in steps.items() if step["predicted_us"] is not None}
    assert times["tuned"] == min(times.values()), "the model tuned it over the kernels of the other steps"
    assert data["shipped"] is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "give `--seq` and `--dim`, or `--preset rtx2070`"),
        (("--preset", "gtx480"), "The presets are rtx2070"),
        (("--preset", "rtx2070", "--device", "h200"), "Leave out `--device`"),
        (("--preset", "rtx2070", "--seq", 1024, "--dim", 64), "Leave out `--device` and the sizes"),
        (("--preset", "rtx2070", "--batch", 3), "--batch came without --seq"),
        (("--seq", 1024), "--seq came without --dim"),
    ],
    ids=str,
)
def test_a_ladder_is_of_a_shape_or_of_a_preset(tune, words: tuple[object, ...], says: str) -> None:
    result = tune("ladder", *words)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


def test_conflicts_of_a_step_stand_in_its_row(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = FakeFarm.submit

    def submit(farm: FakeFarm, kernel: str, *given: Any) -> "Future[CompileResult]":
        shared = SharedAccesses(loads=10, load_wavefronts=63 if kernel == "flash_fwd" else 20, load_excess=43)
        if kernel == "flash_fwd_transposed":
            shared = replace(shared, load_excess=0)
        future: Future[CompileResult] = Future()
        future.set_result(replace(plain(farm, kernel, *given).result(), shared=shared))
        return future

    monkeypatch.setattr(FakeFarm, "submit", submit)
    text = tune(*LADDER).stdout.split("predicted by the models")[1]
    assert "6.3-way" in next(line for line in text.splitlines() if "flash_fwd 64x64" in line)
    assert "none" in next(line for line in text.splitlines() if "flash_fwd_transposed 64x64" in line)
    assert "6.3 wavefronts per load" in text
    steps = {step["name"]: step for step in json.loads(tune(*LADDER, "--json").stdout)["steps"]}
    assert steps["v2"]["shared_accesses"]["ways"] == 6.3


def test_what_was_measured_and_ships_is_shown_first(tune) -> None:
    text = tune(*LADDER).stdout
    measured, predicted = text.index("ships with blocktune"), text.index("predicted by the models")
    assert measured < predicted
    assert "b2 h32 s8192 d64 bf16 on NVIDIA H200, measured on 2026-11-23" in text
    assert "where the two disagree, the measurement is right" in text
    data = json.loads(tune(*LADDER, "--json").stdout)
    assert data["origin"] == "predicted"
    times_us = {step["name"]: step["timing"]["median_us"] for step in data["shipped"]["steps"] if step["timing"]}
    assert times_us["standard"] / times_us["v1"] == pytest.approx(1.04, abs=0.01)
    unmeasured = {step["name"]: step["problem"] for step in data["shipped"]["steps"] if step["timing"] is None}
    assert set(unmeasured) == {"chunked"}
    assert "relative error" in unmeasured["chunked"]
    other = tune(*LADDER, "--causal")
    assert "ships with blocktune" not in other.stdout
    assert json.loads(tune(*LADDER, "--causal", "--json").stdout)["shipped"] is None


def test_a_backward_has_a_ladder_of_its_own(tune, tmp_path: Path) -> None:
    out = tmp_path / "h200.ladder.json"
    result = tune(*LADDER, "--direction", "backward", "--out", out)
    assert result.exit_code == 0, result.output
    assert "b2 h32 s8192 d64 bf16 backward on NVIDIA H200, predicted by the models" in result.stdout
    assert "two_passes: scores are computed again on the chip, twice" in result.stdout
    assert "over v2" not in result.stdout, "it has no such step"
    assert tune(*LADDER, "--out", out).exit_code == 0
    backward, forward = read_ladder(out)["rows"]
    assert [step["name"] for step in backward["steps"]] == [
        "standard", "efficient", "two_passes", "one_pass", "tuned", "hopper"
    ]  # fmt: skip
    assert (backward["shape"]["direction"], forward["shape"]["direction"]) == ("backward", "forward")
    text = ladder_tables(read_ladder(out))
    assert "| two_passes | flash_bwd_split 64x64 w4 s2" in text
    headers = [line for line in text.splitlines() if line.startswith("| step")]
    assert ["over v2" in line for line in headers] == [False, True]


def test_features_have_no_ladder(tune) -> None:
    result = tune(*LADDER, "--features", "softcap")
    assert result.exit_code == 2
    assert "compares attention without features" in result.stderr


def test_a_wrong_step_ends_with_7(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any, **settings: Any) -> Ladder:
        ladder = climb(*given, **settings)
        first, *others = ladder.steps
        return replace(ladder, steps=(replace(first, problem="WrongResultError: 3 of 4 values"), *others))

    monkeypatch.setattr("blocktune.tuner.compare.ladder.climb", wrong)
    result = tune(*LADDER)
    assert result.exit_code == 7
    assert "standard: WrongResultError: 3 of 4 values" in result.stderr
    assert "Not run: WrongResultError" in result.stdout


def test_the_file_grows_by_shapes_and_makes_the_page(tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMIT.name, "c0ffee")
    out = tmp_path / "h200.ladder.json"
    page = f"a\n<!-- results {out.name} -->\nold\n<!-- /results -->\n"
    assert NO_LADDER in with_results(page, tmp_path)
    for words in ((), ("--causal",), ()):
        assert tune(*LADDER, "--out", out, *words).exit_code == 0
    document = read_ladder(out)
    assert [row["shape"]["causal"] for row in document["rows"]] == ["upper_left", "none"]
    text = with_results(page, tmp_path)
    assert text == f"a\n<!-- results {out.name} -->\n{ladder_tables(document)}\n<!-- /results -->\n"
    assert "Predicted for NVIDIA H200" in text
    assert "L2 can keep. Commit c0ffee." in text
    assert "Nothing was measured" in text
    assert text.count("| v1 | flash_v1 64x64 w4 s1 |") == 2
    assert "- v2: loops exchanged" in text


def test_a_measured_step_shows_its_time_and_a_failed_one_its_reason(tune, tmp_path: Path) -> None:
    row = json.loads(tune(*LADDER, "--json").stdout)
    assert row["shape"].pop("label") == row["label"]  # the file has it next to the shape
    row["origin"] = "measured"
    row["steps"][4]["timing"] = {"median_us": 2000.0, "low_us": 1.0, "high_us": 3.0, "tflops": 5.0}
    row["steps"][9] |= {"problem": "no such instruction", "config": None, "hbm_bytes": None, "hbm_bytes_least": None}
    out = tmp_path / "a.ladder.json"
    LadderFile(out, device_named("h200"), ENVIRONMENT).add(row, "tune ladder", "2026-11-21T10:00:00+00:00")
    text = ladder_tables(read_ladder(out))
    assert "Measured for NVIDIA H200 on 2026-11-21 (triton 3.6.0, torch 2.13), by `tune ladder`" in text
    assert "| 2,000 µs | 549.8 |" in text
    assert "| hopper | - | - | - |" in text
    assert "Not run: no such instruction" in text


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.ladder.json"
    path.write_text('{"format": "blocktune-bench", "schema": 1}')
    with pytest.raises(UsageError, match="has format blocktune-ladder"):
        read_ladder(path)
    path.write_text("no JSON")
    with pytest.raises(UsageError, match="is not JSON"):
        read_ladder(path)
    path.unlink()
    LadderFile(path, device_named("h200"), ENVIRONMENT).add({"shape": 1}, "tune ladder", "now")
    with pytest.raises(UsageError, match="another device"):
        LadderFile(path, device_named("rtx2070"), ENVIRONMENT)


def test_the_command_is_kept_without_places() -> None:
    words = ["ladder", "--seq", "8192", "--out", "x.json", "--db=/home/me/a.db", "--causal"]
    assert _command(words) == "tune ladder --seq 8192 --causal"

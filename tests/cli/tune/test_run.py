"""`tune run`: what it hands to the use case, what it prints, how it ends."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from blocktune.db.records.records import Outcome, Regime
from blocktune.kernels.hardware import device
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import NoFeasibleConfigError, VerificationError
from blocktune.tuner.search.report import Budget, Progress, TuningReport

RUN = ("run", "--seq", 8192, "--dim", 64)


class FakeTune:
    """Stands in for the use case: remembers what it got and ends as it is told."""

    def __init__(self, report: TuningReport) -> None:
        self.report = report
        self.error: BaseException | None = None
        self.got: dict[str, Any] = {}

    def __call__(self, shape: object, *, on_progress: Callable[[Progress], None], **given: Any) -> TuningReport:
        self.got = given | {"shape": shape}
        on_progress(Progress(phase="search", done=3, total=40, outcomes={Outcome.OK: 3}))
        if self.error is not None:
            raise self.error
        return self.report


@pytest.fixture
def fake(winner, monkeypatch: pytest.MonkeyPatch) -> FakeTune:
    from blocktune.kernels.hardware.resources import KernelResources
    from blocktune.tuner.occupancy.calculator import occupancy

    resources = KernelResources(registers=168, shared_bytes=98_304, num_warps=4, tensor_cores="wgmma")
    best = winner()
    report = TuningReport(
        best=best,
        reason="faster than the default: 1.200x [1.190, 1.210]",
        occupancy=occupancy(resources, best.device.limits),
        outcomes={Outcome.OK: 110, Outcome.COMPILE_ERROR: 2},
        resumed=12,
        feasible=150,
        dropped={"`shared memory <= 232448 B a block` must hold": 31},
        unsupported={},
        seconds=61.25,
        stored=True,
    )
    stand_in = FakeTune(report)
    monkeypatch.setattr("blocktune.tuner.search.tune.tune", stand_in)
    monkeypatch.setattr(device, "present_devices", tuple)
    return stand_in


def test_flags_become_the_words_of_the_use_case(tune, fake: FakeTune) -> None:
    words = (
        "--trials",
        40,
        "--time-budget",
        9.5,
        "--kernel",
        "flash_fwd",
        "--seed",
        7,
        "--device",
        "a100",
        "--causal",
        "--regime",
        "burst",
    )
    assert tune(*RUN, *words, "--exhaustive").exit_code == 0
    assert fake.got["budget"] == Budget(trials=40, seconds=9.5)
    assert [kernel.name for kernel in fake.got["kernels"]] == ["flash_fwd"]
    assert (fake.got["seed"], fake.got["exhaustive"], fake.got["regime"]) == (7, True, "burst")
    assert fake.got["device"] == device.device_named("a100")
    assert fake.got["shape"].label == "b2 h32 s8192 d64 bf16 causal"
    assert fake.got["store"].label == str(tune.db)


def test_the_json_holds_the_contract(tune, fake: FakeTune) -> None:
    result = tune(*RUN, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["schema"] == 1
    assert {"device", "shape", "best", "default", "outcomes", "seconds"} <= set(data)
    assert {"kernel", "config", "time_us", "origin"} <= set(data["best"])
    assert data["outcomes"] == {"ok": 110, "compile_error": 2}


def test_the_table_has_everything_a_person_asks_for(tune, fake: FakeTune) -> None:
    result = tune(*RUN)
    assert result.exit_code == 0, result.stderr
    for part in (
        "b2 h32 s8192 d64 bf16 on NVIDIA H200",
        "flash_fwd 128x64 w4 s3",
        "812.5 µs",
        "paper rule",
        "1.200x (1.190 to 1.210)",
        "2 blocks/SM, 8 warps (12.5 %), limited by shared memory",
        "150 configs can run; tried: 110 ok, 2 compile error (12 of earlier runs)",
        "31 dropped: `shared memory",
        str(tune.db),
    ):
        assert part in result.stdout, part


def test_without_a_gpu_the_first_line_says_so(tune, fake: FakeTune) -> None:
    lines = tune(*RUN).stderr.splitlines()
    assert lines[0].startswith("no GPU in this machine: compiling for NVIDIA H200")
    assert lines[1] == "assumed --batch 2 (batch * seq = 16384), --heads 32 (heads * dim = 2048)"
    assert "3/40 search" in lines[2]


def test_a_gpu_that_is_here_is_measured(tune, fake: FakeTune, monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(device.device_named("h200"), uuid="GPU-1", source="driver")
    monkeypatch.setattr(device, "present_devices", lambda: (here,))
    assert tune(*RUN).stderr.startswith("measuring on NVIDIA H200\n")
    assert fake.got["device"] is here
    assert tune(*RUN, "--device", "a100").stderr.startswith("no NVIDIA A100-SXM4-80GB in this machine")


def test_a_prediction_shows_no_measured_time(tune, fake: FakeTune, winner) -> None:
    best = winner(
        origin=Origin.PREDICTED, time_us=None, default_time_us=None, paper_time_us=None, speedup_over_default=None
    )
    fake.report = replace(fake.report, best=best)
    text = tune(*RUN).stdout
    assert "predicted" in text
    assert "790.0 µs" in text
    assert "812.5" not in text


def test_an_interrupted_run_shows_what_was_found_and_ends_with_130(tune, fake: FakeTune) -> None:
    fake.report = replace(fake.report, interrupted=True)
    result = tune(*RUN, "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["interrupted"] is True
    assert "all trials are kept" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (NoFeasibleConfigError("nothing fits"), 3),
        (VerificationError("the results differ"), 7),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_run_without_a_result_prints_no_data(tune, fake: FakeTune, error: BaseException, code: int) -> None:
    fake.error = error
    result = tune(*RUN, "--json")
    assert result.exit_code == code
    assert result.stdout == ""


@pytest.mark.parametrize("words", [("--trials", 0), ("--time-budget", 0), ("--time-budget", "nan")], ids=str)
def test_a_budget_that_is_none_is_wrong_use(tune, fake: FakeTune, words: tuple[object, ...]) -> None:
    assert tune(*RUN, *words).exit_code == 2
    assert fake.got == {}


@pytest.mark.slow
def test_a_real_prediction_is_stored_and_answers_tune_best(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "present_devices", tuple)
    words = ("--seq", 512, "--dim", 80, "--device", "h200", "--json")  # no shipped result has this head dimension
    result = tune("run", *words, "--trials", 2, "--kernel", "flash_fwd")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert (data["best"]["origin"], data["best"]["time_us"], data["stored"]) == ("predicted", None, True)
    assert sum(data["outcomes"].values()) == 2
    again = json.loads(tune("best", *words).stdout)
    assert (again["rung"], again["best"]["config"]) == ("predicted", data["best"]["config"])


@pytest.mark.parametrize("exhaustive", [False, True])
def test_jobs_of_an_exhaustive_search_tell_how_many_configs_they_try(exhaustive: bool) -> None:
    from blocktune.cli.tune.run_many import _jobs
    from blocktune.tuner.search.shape_defaults import complete_shape

    search = {
        "device": device.device_named("h200"),
        "budget": Budget(),
        "kernels": None,
        "seed": 0,
        "regime": Regime.BURST,
    }
    shapes = [complete_shape(8192, 64), complete_shape(1, 128, batch=1, heads=32, kv_heads=8, seq_k=8192)]
    forward, decoding = _jobs(shapes, None, search | {"exhaustive": exhaustive})
    assert (decoding.configs > forward.configs > 100) if exhaustive else decoding.configs == forward.configs == 0
    assert (decoding.size > forward.size) is exhaustive
    assert decoding.regime is Regime.BURST

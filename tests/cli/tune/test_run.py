"""`tune run`: what it hands to the use case, what it prints, how it ends."""

import contextlib
import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from blocktune.db.records.records import Objective, Outcome, Regime
from blocktune.kernels.hardware import device
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import NoFeasibleConfigError, VerificationError
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.cost.bands import predicted_text
from blocktune.tuner.occupancy.calculator import occupancy
from blocktune.tuner.search.report import Budget, Progress, TuningReport

RUN = ("run", "--seq", 8192, "--dim", 64)


class FakeTune:
    """Stand in for the use case: remember what it got and end as the test sets it."""

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
        predicted_us={best.config: 790.0, best.default: 990.0},
    )
    stand_in = FakeTune(report)
    monkeypatch.setattr("blocktune.tuner.search.tune.tune", stand_in)
    monkeypatch.setattr("blocktune.tuner.search.arguments.require_possible", lambda *given: None)
    monkeypatch.setattr(device, "present_devices", tuple)
    monkeypatch.setattr("blocktune.runtime.store_reader.sources.shipped_rows", lambda: iter(()))
    monkeypatch.setattr("blocktune.runtime.selection.untuned.shipped_correction", lambda key: None)
    return stand_in


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compiles end at once; the labels of what was requested are kept."""
    labels: list[str] = []

    def submit(farm: object, kernel: str, config: KernelConfig, *_: object) -> Future[CompileResult]:
        labels.append(config.label)
        resources = KernelResources(registers=168, shared_bytes=98_304, num_warps=12, tensor_cores="wgmma")
        future: Future[CompileResult] = Future()
        future.set_result(CompileResult(config=config, outcome=Outcome.OK, resources=resources))
        return future

    monkeypatch.setattr("blocktune.tuner.compile_server.farm.CompileFarm.submit", submit)
    return labels


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
        "--objective",
        "energy",
        "--sampler",
        "coordinate",
        "--study",
        "search.db",
    )
    assert tune(*RUN, *words, "--exhaustive").exit_code == 0
    assert fake.got["budget"] == Budget(trials=40, seconds=9.5)
    assert [kernel.name for kernel in fake.got["kernels"]] == ["flash_fwd"]
    assert (fake.got["seed"], fake.got["exhaustive"], fake.got["regime"]) == (7, True, "burst")
    assert fake.got["objective"] is Objective.ENERGY
    assert (fake.got["sampler"], fake.got["study"]) == ("coordinate", "search.db")
    assert fake.got["device"] == device.device_named("a100")
    assert fake.got["shape"].label == "b2 h32 s8192 d64 bf16 causal"
    assert fake.got["store"].label == str(tune.db)


@pytest.mark.parametrize("words", [("--regime", "burst"), ("--objective", "energy"), ("--heads", 2**20)])
def test_what_cannot_be_is_refused_before_anything_is_shown(words: tuple[object, ...], tune) -> None:
    result = tune(*RUN, "--device", "h200", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "compiling flash" not in result.stderr


@pytest.mark.parametrize("words", [("--args", "a:b"), ("--param", "BLOCK=64"), ("--expand", 4)])
def test_flags_of_an_autotuned_kernel_are_refused_for_a_shape(words: tuple[object, ...], tune, fake: FakeTune) -> None:
    result = tune(*RUN, *words)
    assert result.exit_code == 2
    assert f"{words[0]}: not supported here. Name an autotuned kernel" in result.stderr
    assert not fake.got


def test_the_flag_that_names_a_kernel_is_refused_for_an_autotuned_kernel(tune) -> None:
    result = tune("run", "my_kernels:scale", "--kernel", "flash_fwd")
    assert result.exit_code == 2
    assert "--kernel: not supported here. my_kernels:scale names the kernel." in result.stderr


def test_a_report_prints_in_words(fake: FakeTune) -> None:
    best = fake.report.best
    lines = str(fake.report).splitlines()
    assert lines[0] == f"b2 h32 s8192 d64 bf16 on NVIDIA H200, {best.origin}"
    assert lines[1] == f"winner: {best.config.label}, 812.5 µs"
    assert lines[2].startswith("default: ")
    assert lines[-2:] == [fake.report.reason, "150 configs can run; tried: 110 ok, 2 compile error"]
    unmeasured = replace(fake.report, best=replace(best, time_us=None))
    assert str(unmeasured).splitlines()[1] == (
        f"winner: {best.config.label}, predicted {predicted_text(790.0, best.config.kernel, best.shape, best.device)}"
    )


def test_the_json_holds_the_contract(tune, fake: FakeTune) -> None:
    result = tune(*RUN, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["schema"] == 1
    assert {"device", "shape", "best", "default", "outcomes", "seconds"} <= set(data)
    assert {"kernel", "config", "time_us", "origin"} <= set(data["best"])
    assert data["outcomes"] == {"ok": 110, "compile_error": 2}
    assert (data["default"]["time_us"], data["default"]["predicted_us"]) == (975.0, 990.0)
    assert (data["paper"]["time_us"], data["paper"]["predicted_us"]) == (900.0, None)


def test_the_table_has_everything_a_person_asks_for(tune, fake: FakeTune) -> None:
    result = tune(*RUN, "-v")
    assert result.exit_code == 0, result.stderr
    for part in (
        "b2 h32 s8192 d64 bf16 on NVIDIA H200",
        "flash_fwd 128x64 w4 s3",
        "812.5 µs",
        "FA heuristic",
        "1.200x (1.190 to 1.210)",
        "2 blocks/SM of 4 warps, 12.5 % of the SM's, limited by shared memory",
        "150 configs can run; tried: 110 ok, 2 compile error (12 of earlier runs)",
        "31 invalid: `shared memory",
        str(tune.db),
    ):
        assert part in result.stdout, part


def test_rules_that_dropped_few_configs_share_a_line(tune, fake: FakeTune) -> None:
    fake.report = replace(fake.report, dropped={"a": 2, "b": 1200, "c": 31, "d": 30, "e": 1})
    lines = tune(*RUN, "-v").stdout.splitlines()
    assert [line for line in lines if " invalid" in line] == [
        "1,200 invalid: b",
        "31 invalid: c",
        "30 invalid: d",
        "3 invalid by 2 other rules (--json names each)",
    ]


def test_without_a_gpu_the_first_line_says_so(tune, fake: FakeTune) -> None:
    lines = tune(*RUN, "-v").stderr.splitlines()
    assert lines[0].startswith("no GPU in this machine: compiling for NVIDIA H200")
    assert lines[1] == "assumed --batch 2 (batch * seq = 16384), --heads 32 (heads * dim = 2048)"
    assert lines[2] == "predicting up to 24 configs, for at most 4 s once the first is compiled"
    assert "3/40 search" in lines[3]


def test_a_measurement_that_is_known_comes_before_the_prediction(
    tune, fake: FakeTune, winner, compiles: list[str]
) -> None:
    tune.store(winner())
    result = tune(*RUN, "--time-budget", 5, "-v")
    assert result.exit_code == 0, result.stderr
    known, predicted = result.stdout.split("occupancy of the winner", 1)
    assert "exact: measured on this device for this shape\n" in known
    assert winner().config.label in known
    assert compiles == [winner().config.label]
    assert predicted.splitlines()[0] == (
        ": 1 block/SM of 12 warps, 18.75 % of the SM's, limited by registers "
        "(`w4` is the default partition; 8 warps are specialized)"
    )
    assert result.stdout.endswith("not this prediction; so does `tune best`\n")
    notes = result.stderr.splitlines()
    assert [line.split()[0] for line in notes[2:4]] == ["compiling", "predicting"]
    assert notes[3] == "predicting every config, for at most 5 s once the first is compiled"


def test_what_is_known_is_in_the_json_and_nothing_is_compiled_for_it(
    tune, fake: FakeTune, winner, compiles: list[str]
) -> None:
    assert json.loads(tune(*RUN, "--json").stdout)["known"] is None
    tune.store(winner())
    known = json.loads(tune(*RUN, "--json").stdout)["known"]
    assert (known["rung"], known["source"], known["best"]["time_us"]) == ("exact", "database", 812.5)
    assert compiles == []


def test_what_ships_is_called_that(tune, fake: FakeTune, compiles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("blocktune.tuner.search.tune.tune", fake)
    known = json.loads(tune(*RUN, "--device", "h200", "--json").stdout)["known"]
    assert known["source"] == "shipped"
    assert known["best"]["time_us"] > 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "predicting up to 24 configs, for at most 4 s once the first is compiled"),
        (("--trials", 5), "predicting up to 5 configs"),
        (("--exhaustive",), "predicting every config, however long that takes"),
        (("--exhaustive", "--time-budget", 60), "predicting every config, for at most 60 s once the first is compiled"),
    ],
    ids=str,
)
def test_the_wait_is_named_before_it_begins(tune, fake: FakeTune, words: tuple[object, ...], text: str) -> None:
    assert tune(*RUN, *words).stderr.splitlines()[0] == text


@pytest.mark.parametrize(
    ("ended_by", "told"), [("seconds", "--time-budget SECONDS"), ("trials", "--trials N or --exhaustive"), ("", None)]
)
def test_a_bound_that_ended_the_search_is_named(tune, fake: FakeTune, ended_by: str, told: str | None) -> None:
    fake.report = replace(fake.report, ended_by=ended_by)
    text = tune(*RUN, "-v").stdout
    assert told is None or told in text
    assert ("the search ended" in text) is (told is not None)


def test_kernels_for_other_shapes_are_counted_and_not_listed(tune, fake: FakeTune) -> None:
    reasons = {"flash_v1": "flash_v1 computes forward, but got a backward shape", "flash_decode": "too many queries"}
    fake.report = replace(fake.report, unsupported=reasons)
    text = tune(*RUN, "-v").stdout
    assert "2 kernels are not for this shape (--json names each with its reason)" in text
    assert "flash_v1" not in text
    assert json.loads(tune(*RUN, "--json").stdout)["unsupported"] == reasons


def test_a_gpu_that_is_here_is_measured(tune, fake: FakeTune, monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(device.device_named("h200"), uuid="GPU-1", source="driver")
    monkeypatch.setattr(device, "present_devices", lambda: (here,))
    lines = tune(*RUN, "-v").stderr.splitlines()
    assert lines[0] == "measuring on NVIDIA H200"
    assert lines[2] == "measuring up to 24 configs, for at most 60 s once the first is measured, then finals"
    assert fake.got["device"] is here
    assert tune(*RUN, "--device", "a100", "-v").stderr.startswith("no NVIDIA A100-SXM4-80GB in this machine")


def test_a_prediction_shows_no_measured_time(tune, fake: FakeTune, winner) -> None:
    best = winner(
        origin=Origin.PREDICTED, time_us=None, default_time_us=None, paper_time_us=None, speedup_over_default=None
    )
    fake.report = replace(fake.report, best=best)
    text = tune(*RUN, "-v").stdout
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
def test_a_sampler_that_is_none_is_wrong_use(tune, fake: FakeTune) -> None:
    result = tune(*RUN, "--sampler", "annealing")
    assert result.exit_code == 2
    assert "guided, model" in result.stderr


def test_a_real_prediction_is_stored_and_answers_tune_best(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "present_devices", tuple)
    # No shipped result has this head dimension, and none corrects the model for this device: such would come first.
    words = ("--seq", 512, "--dim", 80, "--device", "a100", "--json")
    result = tune("run", *words, "--trials", 2, "--kernel", "flash_fwd")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert (data["best"]["origin"], data["best"]["time_us"], data["stored"]) == ("predicted", None, True)
    assert sum(data["outcomes"].values()) == 2
    again = json.loads(tune("best", *words).stdout)
    assert (again["rung"], again["best"]["config"]) == ("predicted", data["best"]["config"])


@pytest.mark.parametrize("exhaustive", [False, True])
def test_jobs_of_an_exhaustive_search_tell_how_many_configs_they_try(exhaustive: bool) -> None:
    from blocktune.cli.tune.run_many import jobs_of
    from blocktune.tuner.candidates.shape_defaults import complete_shape

    h200 = device.device_named("h200")
    search = {
        "budget": Budget(),
        "kernels": None,
        "sampler": "guided",
        "study": None,
        "seed": 0,
        "regime": Regime.BURST,
        "objective": Objective.ENERGY,
    }
    shapes = [complete_shape(8192, 64), complete_shape(1, 128, batch=1, heads=32, kv_heads=8, seq_k=8192)]
    forward, decoding = jobs_of(shapes, None, search | {"exhaustive": exhaustive}, h200.key, h200.limits)
    assert (decoding.configs > forward.configs > 100) if exhaustive else decoding.configs == forward.configs == 0
    assert (decoding.size > forward.size) is exhaustive
    assert (decoding.regime, decoding.objective) == (Regime.BURST, Objective.ENERGY)


def test_shapes_of_a_grid_share_one_worker_and_the_next_one_is_compiled_during_finals(
    tune, fake: FakeTune, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, runners, compiled = object(), [], []

    class Farm:
        def submit_ahead(self, kernel: str, config: KernelConfig, shape: Any, cc: tuple[int, int]) -> None:
            compiled.append(shape.seqlen_q)

    def gpu_runner(*given: Any) -> Any:
        return contextlib.nullcontext(worker)

    def finals(shape: Any, *, on_progress: Callable[[Progress], None], runner: object, **given: Any) -> TuningReport:
        runners.append(runner)
        assert set(compiled) == ({shape.seqlen_q} if len(runners) > 1 else set())
        compiled.clear()
        for phase in ("search", "finals", "finals"):
            on_progress(Progress(phase=phase, done=3, total=3))
        return fake.report

    monkeypatch.setattr("blocktune.tuner.search.tune.tune", finals)
    monkeypatch.setattr("blocktune.tuner.search.run.farm_for", lambda device: contextlib.nullcontext(Farm()))
    monkeypatch.setattr("blocktune.cli.tune.run_many.is_present", lambda device: True)
    monkeypatch.setattr("blocktune.tuner.measure.locked_runner.gpu_runner", gpu_runner)
    assert tune("run", "--grid", "seq=512,1024,2048 dim=64", "--device", "h200").exit_code == 0
    assert runners == [worker, worker, worker]
    assert compiled == []

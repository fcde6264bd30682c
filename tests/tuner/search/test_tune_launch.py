"""A call of an autotuned kernel goes through the search that tunes shapes: same study, finals, records and report."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from blocktune.db.records.records import Outcome
from blocktune.db.store import ResultStore
from blocktune.kernels.values.config import Origin
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import KernelProblem, LaunchConfig
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.compile_server.compile_ahead import CompileAhead
from blocktune.tuner.launches.launch_bench import LaunchTools
from blocktune.tuner.launches.launch_runner import LaunchMachine
from blocktune.tuner.search.arguments import SearchOptions
from blocktune.tuner.search.report import Budget, TuningReport
from blocktune.tuner.search.tune_launch import tune_launch
from blocktune.tuner.subject.launch_compiler import LaunchCompiler
from tests.support.fakes.fake_triton import FakeGpu, FakeHookedClock, Launch
from tests.support.libraries.autotuned_kernels import CONFIGS
from tests.support.triton_modes import compiled_here
from tests.tuner.drop_in.conftest import H200, compiler, decorated, gpu, grid, path

__all__ = ["compiler", "gpu", "path"]

pytestmark = compiled_here


@pytest.fixture
def store(path: Path) -> Iterator[ResultStore]:
    with ResultStore.open(path) as opened:
        yield opened


def call_of(**options: Any) -> AutotunedCall:
    kernel = decorated(**options).kernel
    return kernel.call_of([torch.ones(1000), 1000, 2.0], {"warmup": False, "grid": grid})


def tuned(
    call: AutotunedCall, gpu: FakeGpu, compiler: CompileAhead, store: ResultStore, options: SearchOptions | None = None
) -> TuningReport:
    tools = LaunchTools(lambda l2: FakeHookedClock(gpu), lambda: None)
    return tune_launch(
        call, H200, store, options or SearchOptions(), machine=LaunchMachine(ahead=compiler, launches=tools)
    )


def test_the_list_is_searched_and_every_trial_is_kept(gpu: FakeGpu, compiler: CompileAhead, store: ResultStore) -> None:
    call = call_of()
    report = tuned(call, gpu, compiler, store)
    assert report.best.config.parameters == {"BLOCK": 256, "num_warps": 2, "num_stages": 3}
    assert report.best.default == call.default
    assert report.best.origin is Origin.MEASURED
    assert report.outcomes == {Outcome.OK: len(CONFIGS)}
    (best,) = store.kernel_bests(H200)
    assert (best.config, best.shape.problem) == (report.best.config, call.listed_problem)
    assert report.occupancy is not None


def test_a_finished_search_answers_at_once(gpu: FakeGpu, compiler: CompileAhead, store: ResultStore) -> None:
    tuned(call_of(), gpu, compiler, store)
    timed = len(gpu.timed)
    again = tuned(call_of(), gpu, compiler, store)
    assert again.reason == "found by an earlier run"
    assert len(gpu.timed) == timed


@pytest.mark.few(2)
@pytest.mark.parametrize("sampler", ["guided", "tpe", "coordinate", "random", "model"])
def test_samplers_choose_within_a_budget(
    sampler: str, gpu: FakeGpu, compiler: CompileAhead, store: ResultStore
) -> None:
    report = tuned(call_of(), gpu, compiler, store, SearchOptions(sampler=sampler, budget=Budget(trials=3)))
    assert sum(report.outcomes.values()) == 3
    assert report.ended_by == "trials"


def test_expand_goes_on_around_the_best(gpu: FakeGpu, compiler: CompileAhead, store: ResultStore) -> None:
    gpu.time_us = lambda launch: 100.0 + abs(launch.arguments["BLOCK"] - 1024) / 10 + launch.num_warps
    report = tuned(call_of(expand=16), gpu, compiler, store)
    assert report.best.config.parameters["BLOCK"] == 1024
    assert len(CONFIGS) < sum(report.outcomes.values()) <= len(CONFIGS) + 16


def test_a_search_that_finds_nothing_more_to_try_was_ended_by_no_bound(
    gpu: FakeGpu, compiler: CompileAhead, store: ResultStore
) -> None:
    report = tuned(call_of(expand=1000), gpu, compiler, store)
    assert len(CONFIGS) < sum(report.outcomes.values()) < len(CONFIGS) + 1000
    assert report.ended_by == ""


def test_what_is_known_of_another_list_takes_no_place_in_this_one(
    gpu: FakeGpu, compiler: CompileAhead, store: ResultStore
) -> None:
    older = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (512, 1024, 2048) for warps in (1, 2, 4, 8)]
    listed = [triton.Config({"BLOCK": block}, num_warps=4) for block in (128, 256)]
    tuned(call_of(configs=older), gpu, compiler, store)
    gpu.timed.clear()
    report = tuned(call_of(configs=listed, expand=4), gpu, compiler, store)
    assert {128, 256} <= {launch.arguments["BLOCK"] for launch in gpu.timed}
    assert report.best.config.parameters["BLOCK"] == 256


def test_an_interrupted_search_stores_no_winner_that_calls_would_take_for_final(
    gpu: FakeGpu, compiler: CompileAhead, store: ResultStore
) -> None:
    def interrupted(launch: Launch) -> float:
        if launch.arguments["BLOCK"] == 512:
            raise KeyboardInterrupt
        return 100.0

    gpu.time_us = interrupted
    call = call_of()
    report = tuned(call, gpu, compiler, store)
    assert report.interrupted
    assert not report.stored
    assert store.kernel_bests() == []
    assert store.trials(H200, KernelProblem(call.name, call.sized_problem))


def test_a_search_that_the_machine_disturbed_stores_no_winner(
    gpu: FakeGpu, compiler: CompileAhead, store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest config finds no space for its code, and is tried when there is."""
    submit = LaunchCompiler.submit

    def submit_others(self: LaunchCompiler, config: LaunchConfig) -> "Future[CompileResult[LaunchConfig]]":
        if config.parameters["BLOCK"] != 256:
            return submit(self, config)
        full: Future[CompileResult[LaunchConfig]] = Future()
        full.set_result(
            CompileResult(
                config=config,
                outcome=Outcome.COMPILE_ERROR,
                resources=None,
                error="OSError: [Errno 28] No space left",
                seconds=0.0,
                transient=True,
            )
        )
        return full

    with monkeypatch.context() as patched:
        patched.setattr(LaunchCompiler, "submit", submit_others)
        report = tuned(call_of(), gpu, compiler, store)
    assert report.best.config.parameters["BLOCK"] != 256
    assert not report.stored
    assert store.kernel_bests() == []
    assert tuned(call_of(), gpu, compiler, store).best.config.parameters["BLOCK"] == 256
    assert len(store.kernel_bests()) == 1


def test_a_config_that_computes_something_else_is_wrong(
    gpu: FakeGpu, compiler: CompileAhead, store: ResultStore
) -> None:
    def effect(launch: Launch) -> None:
        launch.arguments["x"].fill_(launch.arguments["BLOCK"])

    gpu.effect = effect
    report = tuned(call_of(), gpu, compiler, store)
    assert report.best.config.parameters["BLOCK"] == 128
    assert report.outcomes == {Outcome.OK: 2, Outcome.WRONG_RESULT: 4}

"""Functions of other people are searched, checked, killed and kept as our own kernels."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.db.records.records import Outcome
from blocktune.db.records.user_records import UserTrial
from blocktune.db.user_store import UserKernelStore
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.tuned.config import Problem, UserConfig
from blocktune.kernels.tuned.fallback import UserRung, stored_winners
from blocktune.kernels.tuned.function import TunedFunction, tuned
from blocktune.kernels.values.errors import NoDeviceError, NoFeasibleConfigError, UsageError
from blocktune.tuner.measure.runner import Deadlines, GpuRunner
from blocktune.tuner.sampling.study_storage import open_study
from blocktune.tuner.search.report import Budget
from blocktune.tuner.search.studies import sampled_by_tpe
from blocktune.tuner.tuned.arguments import load_arguments, save_arguments
from blocktune.tuner.tuned.check import CallQuestion
from blocktune.tuner.tuned.run import UserSpace
from blocktune.tuner.tuned.tune_function import tune_function
from tests.support import user_functions
from tests.support.programs import ROOT, program

WORKER = program("fake_user_worker")
NO_WORKER = ("false",)
DEVICE = device_named("h200")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def store(path: Path) -> Iterator[UserKernelStore]:
    with UserKernelStore.open(path) as opened:
        yield opened


def test_the_fastest_right_config_wins_and_the_rest_is_kept_with_its_reason(store: UserKernelStore) -> None:
    """In two runs: the first one is cut short, the second one goes on where it stopped."""
    function, x = user_functions.risky, torch.randn(32, 256)
    cut = tune_function(function, (x,), store=store, device=DEVICE, command=WORKER, budget=Budget(trials=1))
    assert (cut.best.config.parameters, cut.outcomes[Outcome.OK]) == ({"block": 16}, 1)

    tried: list[str] = []

    def on_trial(trial: UserTrial) -> None:
        tried.append(trial.config.label)

    report = tune_function(
        function,
        (x,),
        store=store,
        device=DEVICE,
        command=WORKER,
        on_trial=on_trial,
    )
    assert tried == [f"risky block={block}" for block in (32, 64, 128, 256)]
    assert report.best.config.parameters == {"block": 32}
    assert report.best.default.parameters == {"block": 16}
    assert report.best.speedup_over_default is not None
    assert report.best.speedup_over_default > 2
    assert report.outcomes == {Outcome.OK: 2, Outcome.WRONG_RESULT: 1, Outcome.RUN_ERROR: 2}
    assert (report.resumed, report.feasible, report.dropped) == (1, 5, 0)

    problem = Problem.of({"x": x})
    trials = store.trials(DEVICE, function.name, function.source_hash, problem, report.best.environment)
    errors = {trial.config.parameters["block"]: trial.error for trial in trials}
    assert "relative error" in errors[64]
    assert "no such instruction" in errors[128]
    assert "SIGABRT" in errors[256]

    again = tune_function(function, (x,), store=store, device=DEVICE, command=NO_WORKER)
    assert again.reason == "found by an earlier run"
    assert again.best == report.best


def test_a_triton_kernel_in_the_interpreter(
    store: UserKernelStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the choices to what the production path reads, without SQLAlchemy."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the worker
    function, x = user_functions.softmax, torch.randn(3, 400)
    report = tune_function(function, (x,), store=store, device=DEVICE, command=WORKER, budget=Budget(trials=2))
    assert report.outcomes == {Outcome.OK: 2}
    assert report.dropped == 5  # a block of 256 covers no row of 400
    (winner,) = stored_winners(function.name, function.source_hash, DEVICE, path)
    assert (winner.problem, winner.config) == (Problem.of({"x": x}), report.best.config)


def test_a_hanging_candidate_is_killed(tmp_path: Path) -> None:
    function: TunedFunction = user_functions.hanging

    class Subject:
        label = "hanging"

        def to_json(self) -> dict[str, Any]:
            document = save_arguments({"x": torch.randn(8, 32)}, tmp_path)
            return document | {"function": function.name, "source_hash": function.source_hash}

    deadlines = Deadlines(compiling=1.0, running=1.0)
    environment = {"PYTHONPATH": ":".join(sys.path)}
    runner = GpuRunner(Subject(), command=WORKER, environment=environment, deadlines=deadlines)  # type: ignore[arg-type]
    try:
        outcomes = [runner.measure(config).outcome for config in function.choices.all]  # type: ignore[arg-type]
    finally:
        runner.close()
    assert outcomes == [Outcome.OK, Outcome.COMPILE_TIMEOUT]


def test_nothing_is_kept_of_a_function_that_is_never_right(store: UserKernelStore) -> None:
    x = torch.randn(4, 32)
    with pytest.raises(NoFeasibleConfigError, match=r"1 wrong_result.*hopeless block=16"):
        tune_function(user_functions.hopeless, (x,), store=store, device=DEVICE, command=WORKER)
    function = user_functions.hopeless
    assert store.best(DEVICE, function.name, function.source_hash, Problem.of({"x": x})) is None


def test_constraints_that_nothing_fulfils_are_told(store: UserKernelStore) -> None:
    with pytest.raises(NoFeasibleConfigError, match="a block covers a row"):
        tune_function(user_functions.softmax, (torch.randn(2, 10_000),), store=store, device=DEVICE, command=NO_WORKER)


def test_only_importable_functions_can_be_tuned(store: UserKernelStore) -> None:
    @tuned(parameters={"block": (16,)}, reference=user_functions.doubled)
    def local(x: torch.Tensor, *, block: int) -> torch.Tensor:
        return 2 * x

    with pytest.raises(UsageError, match="top level of a module"):
        tune_function(local, (torch.randn(2, 2),), store=store, device=DEVICE)


def test_tuning_needs_a_gpu(store: UserKernelStore) -> None:
    with pytest.raises(NoDeviceError, match="no argument of the call is on one"):
        tune_function(user_functions.softmax, (torch.randn(2, 20),), store=store)


@pytest.mark.parametrize(
    "given", [(torch.ones(2, 2),), ((torch.ones(2),), torch.ones(2)), (3,)], ids=["tensor", "two", "int"]
)
def test_arguments_that_are_not_in_a_list_are_refused_with_an_example(given: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match=r"as a list and a dictionary, but got .*tune_function\(function, \[x, y\]"):
        tune_function(user_functions.softmax, *given)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5, dtype=torch.float64),
        torch.randn(6, 8)[::2, 1:].to(torch.bfloat16).mT,
        torch.arange(4).expand(3, 4),
        torch.rand(7) > 0.5,
        torch.empty(0, 3),
        torch.tensor(3.5),
    ],
    ids=["dense", "transposed", "broadcast", "bool", "empty", "scalar"],
)
def test_arguments_arrive_as_they_were(tmp_path: Path, tensor: torch.Tensor) -> None:
    arguments = {"x": tensor, "scale": 0.5, "causal": True, "name": None}
    loaded = load_arguments(save_arguments(arguments, tmp_path))
    assert torch.equal(loaded.pop("x"), tensor)
    assert loaded == {"scale": 0.5, "causal": True, "name": None}


def question(x: torch.Tensor, tolerance: float | None = None) -> CallQuestion:
    return CallQuestion({"x": x}, user_functions.doubled, tolerance)


def problem_of(function: Any, asked: CallQuestion) -> str | None:
    result = asked.new_result()
    asked.poison(result)
    asked.thunk(function, result)()
    return asked.problem(result)


def test_a_changed_argument_is_wrong_and_restored() -> None:
    asked = question(torch.ones(4, 4))
    assert "`x` was changed" in str(problem_of(lambda x: x.mul_(2), asked))
    assert problem_of(lambda x: x + x, asked) is None


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda x: 2 * x[:2], "it returns"),
        (lambda x: (2 * x).double(), "it returns"),
        (lambda x: (2 * x, x), "it returns"),
        (lambda x: (2 * x).index_fill(0, torch.tensor([65]), float("nan")), "4 of 400 values"),
        (lambda x: torch.cat([2 * x[:99], 3 * x[99:]]), "rows 64.. of output 0"),
    ],
    ids=["shape", "dtype", "count", "nan", "one row"],
)
def test_wrong_results_are_told_apart(function: Any, problem: str) -> None:
    assert problem in str(problem_of(function, question(torch.ones(100, 4))))


def test_infinities_that_the_reference_has_are_right() -> None:
    x = torch.tensor([[float("inf"), 1.0], [float("-inf"), float("nan")]])
    assert problem_of(lambda x: x + x, question(x)) is None


def test_other_data_types_must_be_equal() -> None:
    assert "1 of 6 values of output 0 are wrong" in str(
        problem_of(lambda x: (2 * x).index_fill(0, torch.tensor([3]), 1), question(torch.arange(6)))
    )


def test_a_tolerance_of_ones_own() -> None:
    x = torch.ones(8, 4)
    assert problem_of(lambda x: 2.02 * x, question(x, tolerance=0.1)) is None
    assert problem_of(lambda x: 2.02 * x, question(x)) is not None


@pytest.mark.gpu
def test_a_softmax_is_tuned_and_dispatched_on_the_gpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_DB", str(path))
    monkeypatch.syspath_prepend(str(ROOT))  # where the worker finds the function's module
    function, x = user_functions.softmax, torch.randn(2048, 3000, device="cuda")
    function.reload()
    assert function.explain(x).rung is UserRung.DEFAULT
    report = tune_function(function, (x,), budget=Budget(trials=12, seconds=60.0))
    assert report.outcomes[Outcome.OK] >= 8
    assert function.explain(x).rung is UserRung.EXACT
    assert function.explain(x).config == report.best.config
    torch.testing.assert_close(function(x), torch.softmax(x, -1))
    assert function.explain(torch.randn(4096, 3500, device="cuda")).rung is UserRung.NEAREST
    wide = torch.randn(4, 9000, device="cuda")  # wider than every block
    torch.testing.assert_close(function(wide), torch.softmax(wide, -1))
    assert function.explain(wide).rung is UserRung.REFERENCE


@pytest.mark.gpu
def test_a_captured_graph_runs_the_tuned_function_and_refuses_new_calls() -> None:
    function, x = user_functions.softmax, torch.randn(64, 500, device="cuda")
    function(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(x)
        with pytest.raises(UsageError, match="must have run once"):
            function(x[:32])
        with pytest.raises(UsageError, match="CUDA graph"):
            tune_function(function, (x,))
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(captured, torch.softmax(x, -1))


def test_configs_of_a_stored_winner_are_values(store: UserKernelStore) -> None:
    config = UserConfig("module:f", (("num_warps", 4), ("BLOCK", 64)))
    assert UserConfig.from_json(config.to_json()) == config
    assert config.label == "f BLOCK=64 num_warps=4"


def test_large_spaces_are_sampled() -> None:
    configs: Any = user_functions.softmax.choices.feasible({"x": torch.empty(2, 20)})
    proposals = sampled_by_tpe(open_study("softmax"), UserSpace(configs), configs, startup=3, seed=0)  # type: ignore[arg-type]
    proposed: list[Any] = []
    for _ in range(12):
        config = proposals.propose()
        assert config is not None
        proposed.append(config)
        proposals.tell(config, 1.0 + abs(dict(config.parameters)["block"] - 1024))
    assert len(set(proposed)) == 12
    assert set(proposed) <= set(configs)

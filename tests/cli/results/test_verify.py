"""`tune verify` without a GPU: which winners are verified, what is shown, and how it ends."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from blocktune.db.records.records import Best, Environment, Outcome, Regime
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.lab.replay import ReplayRunner
from blocktune.tuner.measure.measurement import Measurement, Terms

# Without its clock no model predicts what the made-up resources below would take.
DEVICE = replace(device_named("h200"), source="driver", uuid=None, clock_mhz=None)
HERE = Environment(triton="3.9.0", ptxas="13.1", torch="2.15", driver="600")


Events = list[tuple[str, AttentionShape]]
"""What was done for which shape, in order: `compile`, `turn` or `measure`."""


class InstantCompiler:
    """Gives every config resources that fit, and code of its own."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def submit_with_lse(self, *job: Any) -> "Future[bool]":
        return Future()

    def submit(self, kernel: str, config: KernelConfig, shape: AttentionShape, cc: Any) -> "Future[CompileResult]":
        self._events.append(("compile", shape))
        resources = KernelResources(registers=128, shared_bytes=65536, num_warps=config.num_warps, tensor_cores="wgmma")
        future: Future[CompileResult] = Future()
        future.set_result(CompileResult(config=config, outcome=Outcome.OK, resources=resources, error="", seconds=0.1))
        return future


class Timed(ReplayRunner):
    """Every config takes 1000 µs, but those with times of their own; None is a wrong result."""

    def __init__(self, shape: AttentionShape, times: dict[KernelConfig, float | None], events: Events):
        super().__init__({})
        self._shape, self._times, self._events = shape, times, events

    def turn_to(self, shape: AttentionShape, *, terms: Terms) -> None:
        assert terms.regime is Regime.SUSTAINED
        self._events.append(("turn", shape))
        self._shape = shape

    def measure(self, config: KernelConfig) -> Measurement:
        self._events.append(("measure", self._shape))
        self._recorded[config] = self._result(self._times.get(config, 1000.0))
        return super().measure(config)

    def _result(self, time_us: float | None) -> Measurement:
        if time_us is None:
            return Measurement(outcome=Outcome.WRONG_RESULT, error="relative error 1.0e-01")
        samples = tuple(time_us * (1 + 1e-4 * (round % 3)) for round in range(15))
        return Measurement(outcome=Outcome.OK, time_us=time_us, relative_to_anchor=time_us / 1000.0, samples_us=samples)


@pytest.fixture
def events() -> Events:
    """What the compiler and the GPU of the test are asked for."""
    return []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, events: Events) -> dict[KernelConfig, float | None]:
    """A GPU that is not there; the test says how long configs take."""
    times: dict[KernelConfig, float | None] = {}

    @contextlib.contextmanager
    def runner(shape: AttentionShape, *_: Any) -> Iterator[Timed]:
        yield Timed(shape, times, events)

    compiler = InstantCompiler(events)
    monkeypatch.setattr("blocktune.kernels.hardware.device.current_device", lambda: DEVICE)
    monkeypatch.setattr("blocktune.tuner.measure.environment.measuring_environment", lambda *_: HERE)
    monkeypatch.setattr("blocktune.tuner.search.run.farm_for", lambda _: contextlib.nullcontext(compiler))
    monkeypatch.setattr("blocktune.tuner.measure.locked_runner.gpu_runner", runner)
    return times


def stored(tune) -> Best:
    with ResultStore.open(tune.db) as store:
        (best,) = store.bests()
    return best


def test_after_an_upgrade_every_winner_is_timed_again_once(tune, winner, gpu: dict[KernelConfig, float | None]) -> None:
    gpu[winner().config] = 406.25
    tune.store(winner())
    result = tune("verify")
    assert result.exit_code == 0, result.stderr
    assert "triton 3.6.0 became 3.9.0" in result.stderr
    for part in ("b2 h32 s8192 d64 bf16", "winner", "default", "812.5 µs", "406.3 µs", "0.500", "the winner stays"):
        assert part in result.stdout
    assert (stored(tune).environment, stored(tune).config) == (HERE, winner().config)
    assert "0 winners of NVIDIA H200 to verify" in tune("verify").stderr
    (again,) = json.loads(tune("verify", "--all", "--json").stdout)["verified"]
    assert again["before"]["time_us"] == pytest.approx(406.25, rel=1e-3)
    assert not again["changed"]


def test_the_configs_of_all_winners_compile_before_the_first_is_measured(
    tune, winner, gpu: dict[KernelConfig, float | None], events: Events
) -> None:
    tune.store(winner(), winner(shape=complete_shape(512, 64)))
    result = tune("verify")
    assert result.exit_code == 0, result.stderr
    work = [event for event, _ in itertools.groupby(events)]
    first, second = work[0][1], work[1][1]
    assert work[:3] == [("compile", first), ("compile", second), ("compile", first)], "the third is its search's own"
    assert work[3:] == [("measure", first), ("turn", second), ("compile", second), ("measure", second)]


def test_a_winner_that_became_slow_is_replaced(tune, winner, gpu: dict[KernelConfig, float | None]) -> None:
    gpu[winner().config] = 2000.0
    tune.store(winner())
    result = tune("verify")
    assert result.exit_code == 0, result.stderr
    assert "the winner is now" in result.stdout
    assert stored(tune).config == stored(tune).default != winner().config


def test_a_winner_that_computes_wrong_results_ends_with_7(tune, winner, gpu: dict[KernelConfig, float | None]) -> None:
    gpu[winner().config] = None
    tune.store(winner())
    result = tune("verify")
    assert result.exit_code == 7
    assert "relative error 1.0e-01" in result.stdout
    assert stored(tune).config != winner().config


def test_winners_of_other_devices_and_predictions_are_left_alone(
    tune, winner, gpu: dict[KernelConfig, float | None]
) -> None:
    elsewhere = winner(device=device_named("a100"))
    predicted = winner(shape=complete_shape(512, 64), origin=Origin.PREDICTED, time_us=None)
    tune.store(elsewhere, predicted)
    result = tune("verify", "--all", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["verified"] == []
    assert gpu == {}

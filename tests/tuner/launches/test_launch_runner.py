"""The runner of an autotuned call: its configs race as those of attention do, and cost nobody else."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune.db.records.records import Outcome, Telemetry
from blocktune.kernels.values.errors import BlocktuneError, UsageError
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.runtime.autotuned.settings import Settings
from blocktune.tuner.launches import launch_bench
from blocktune.tuner.launches.launch_bench import LaunchBench, LaunchTools
from blocktune.tuner.launches.launch_runner import LaunchRunner
from blocktune.tuner.measure.energy import EnergyMeter
from blocktune.tuner.measure.measurement import Terms
from blocktune.tuner.measure.protocol import HEAT_SECONDS, IDLE_SECONDS, RACE_ROUNDS
from blocktune.tuner.measure.worker_process import Deadlines
from tests.support.fakes.fake_call import FIRST, OTHER, THIRD, KnownLaunchClock, fake_call

pytestmark = pytest.mark.triton_free


class CountingQueue:
    """Has done what is enqueued when it returns; energy rises with every launch."""

    def __init__(self) -> None:
        self.joules = 0.0

    def enqueue(self, launch: Callable[[], None], count: int) -> Callable[[], bool]:
        for _ in range(count):
            launch()
            self.joules += 0.05
        return lambda: True

    def synchronize(self) -> None:
        """Nothing runs behind."""


def runner_of(call: AutotunedCall, meter: EnergyMeter | None = None, **changes: Any) -> LaunchRunner:
    clock = KnownLaunchClock({FIRST: 1000.0, OTHER: 900.0, THIRD: 1200.0})
    return LaunchRunner(call, tools=LaunchTools(lambda l2: clock, lambda: meter), **changes)


def summing(out: Tensor, x: Tensor, BLOCK: int) -> None:
    out.add_(x)


@pytest.fixture
def out() -> Tensor:
    return torch.zeros(4)


@pytest.fixture
def runner(out: Tensor) -> Iterator[LaunchRunner]:
    made = runner_of(fake_call(summing, out=out, x=torch.ones(4)))
    yield made
    made.close()


def test_configs_are_timed_against_the_first_of_the_list(runner: LaunchRunner, out: Tensor) -> None:
    other, first = runner.measure(OTHER), runner.measure(FIRST)
    assert runner.anchor == FIRST
    assert (other.outcome, other.time_us, other.relative_to_anchor) == (Outcome.OK, 900.0, 0.9)
    assert (first.outcome, first.relative_to_anchor) == (Outcome.OK, 1.0)
    assert torch.equal(out, torch.zeros(4)), "what timed launches have added up is taken back"


def test_a_config_of_no_list_is_launched_and_may_lose_its_race(runner: LaunchRunner, monkeypatch: Any) -> None:
    monkeypatch.setattr("blocktune.runtime.autotuned.call.triton_config", made_config)
    runner.measure(OTHER)
    third = runner.measure(THIRD)
    assert (third.outcome, len(third.samples_us)) == (Outcome.OK, RACE_ROUNDS)
    assert third.error == "stopped after 2 rounds, 1.33 times the best so far"


def made_config(config: LaunchConfig) -> Any:
    """Triton's form of a config."""
    return SimpleNamespace(pre_hook=None, all_kwargs=lambda: config.parameters, kwargs=config.parameters)


def test_finals_are_paired_rounds_and_the_winner_is_checked_again(runner: LaunchRunner, out: Tensor) -> None:
    runner.measure(OTHER)
    finals = runner.finals([FIRST, OTHER])
    assert {config: set(samples) for config, samples in finals.samples_us.items()} == {FIRST: {1000.0}, OTHER: {900.0}}
    assert runner.confirm(OTHER).outcome is Outcome.OK
    assert torch.equal(out, torch.zeros(4))


def test_energies_are_those_of_launches_without_their_hooks(out: Tensor) -> None:
    queue = CountingQueue()
    meter = EnergyMeter(queue, lambda: queue.joules, iter(float(tick) / 1e3 for tick in range(10**9)).__next__)
    runner = runner_of(fake_call(summing, out=out, x=torch.ones(4)), meter)
    bursts = runner.energies([FIRST, OTHER], 2).bursts
    assert {config: len(rounds) for config, rounds in bursts.items()} == {FIRST: 2, OTHER: 2}
    runner.close()
    assert torch.equal(out, torch.zeros(4))


def test_a_gpu_without_a_counter_has_no_energies(runner: LaunchRunner) -> None:
    assert runner.energies([FIRST], 2).bursts == {}


def test_a_config_that_computes_something_else_is_wrong(out: Tensor) -> None:
    runner = runner_of(fake_call(lambda out, x, BLOCK: out.copy_(x * BLOCK), out=out, x=torch.ones(4)))
    found = runner.measure(OTHER)
    assert (found.outcome, found.transient) == (Outcome.WRONG_RESULT, False)
    assert "`out` differs from what the first config computes by 1.0e+00" in found.error
    assert runner.measure(FIRST).outcome is Outcome.OK


def failing_with(error: Exception, block: int = 2) -> Callable[..., None]:
    def effect(out: Tensor, x: Tensor, BLOCK: int) -> None:
        out.add_(x)
        if block == BLOCK:
            raise error

    return effect


@pytest.mark.parametrize(
    ("error", "outcome", "transient"),
    [
        (OSError(28, "No space left on device"), Outcome.RUN_ERROR, True),
        (RuntimeError("CUDA error: uncorrectable ECC error"), Outcome.RUN_ERROR, True),
        (ValueError("no such block"), Outcome.RUN_ERROR, False),
        (type("OutOfResources", (Exception,), {})("shared memory"), Outcome.INFEASIBLE, False),
    ],
)
def test_what_fails_is_an_outcome_and_affects_no_other(
    out: Tensor, error: Exception, outcome: Outcome, transient: bool
) -> None:
    runner = runner_of(fake_call(failing_with(error), out=out, x=torch.ones(4)))
    found = runner.measure(OTHER)
    assert (found.outcome, found.transient) == (outcome, transient)
    assert str(error) in found.error
    assert runner.measure(FIRST).outcome is Outcome.OK
    runner.close()
    assert torch.equal(out, torch.zeros(4))


def test_where_the_first_config_fails_the_next_one_that_runs_takes_its_place(out: Tensor) -> None:
    runner = runner_of(fake_call(failing_with(ValueError("no"), block=1), out=out, x=torch.ones(4)))
    assert runner.measure(OTHER).relative_to_anchor == 1.0
    assert runner.anchor == OTHER
    assert runner.measure(FIRST).outcome is Outcome.RUN_ERROR


def test_a_process_that_has_lost_its_gpu_says_so(out: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(clock: Any) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(KnownLaunchClock, "synchronize", synchronize)
    runner = runner_of(fake_call(failing_with(RuntimeError("an illegal memory access")), out=out, x=torch.ones(4)))
    with pytest.raises(BlocktuneError, match=r"cost this process its GPU context.*by `isolate`"):
        runner.measure(OTHER)


class OtherProcess:
    """A GPU that another process works on."""

    def sample(self) -> Telemetry:
        return Telemetry(other_processes=1)

    def energy_j(self) -> None:
        return None


def test_what_another_process_disturbs_is_measured_twice_and_says_so(out: Tensor) -> None:
    runner = runner_of(fake_call(summing, out=out, x=torch.ones(4)), monitor=OtherProcess(), terms=Terms(race=False))
    found = runner.measure(OTHER)
    assert found.error.startswith("measured twice, since ")
    assert found.telemetry.other_processes == 1


def test_a_call_that_cannot_travel_is_no_isolated_one(out: Tensor) -> None:
    call = replace(fake_call(summing, out=out, x=torch.ones(4)), settings=Settings(isolate=True))
    with pytest.raises(UsageError, match=r"must import the kernel, but m:f is in a script"):
        runner_of(call, deadlines=Deadlines())


def test_an_idle_gpu_is_heated_before_launches_are_timed(out: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    heated, now = list[float](), [100.0]
    monkeypatch.setattr(KnownLaunchClock, "heat", lambda clock, launch, seconds: heated.append(seconds))
    monkeypatch.setattr(launch_bench, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = KnownLaunchClock({FIRST: 1000.0})
    call = fake_call(summing, out=out, x=torch.ones(4))
    timed = LaunchBench(call, LaunchTools(lambda l2: clock, lambda: None), Terms())
    timed.rounds([FIRST], 1)
    assert heated == []  # the first launch was a moment ago
    now[0] += 2 * IDLE_SECONDS
    timed.rounds([FIRST], 1)
    assert heated == [HEAT_SECONDS]

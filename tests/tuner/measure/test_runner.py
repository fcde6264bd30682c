"""Every way to fail costs one candidate: the worker is replaced, the next config is measured, and nothing is left."""

import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from blocktune.db.records.records import Outcome, Telemetry
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import BlocktuneError, UsageError
from blocktune.tuner.measure.measurement import REPEATED, Measurement, Terms
from blocktune.tuner.measure.runner import GpuRunner
from blocktune.tuner.measure.worker_process import Deadlines
from tests.support.fakes.fake_kernels import SHAPE
from tools import program, python

WORKER = program("workers.fake_worker")
DEADLINES = Deadlines(setup=120.0, compiling=3.0, running=3.0, finals=20.0)


pytestmark = pytest.mark.triton_free


def config(kernel: str, block_m: int = 64) -> KernelConfig:
    return KernelConfig(kernel, block_m, 64, 4, 2)


class CountingMonitor:
    """A GPU whose clock rises with every sample, and that takes 500 W while a watch counts seconds by `monotonic`."""

    def __init__(self) -> None:
        self.samples = 0
        self.last_sampled = 0.0
        self._watched: list[float] = []

    def monotonic(self) -> float:
        self._watched.append(time.monotonic())
        return self._watched[-1]

    def sample(self) -> Telemetry:
        self.samples += 1
        self.last_sampled = time.monotonic()
        return Telemetry(sm_clock_mhz=1000 + self.samples)

    def energy_j(self) -> float:
        return 500.0 * (sum(self._watched[1::2]) - sum(self._watched[::2]))


def new_runner(**changes: Any) -> GpuRunner:
    return GpuRunner(**{"shape": SHAPE, "command": WORKER, "deadlines": DEADLINES} | changes)


@pytest.fixture(scope="module")
def runner() -> Iterator[GpuRunner]:
    """Its anchor is `honest`, whichever test asks first."""
    runner = new_runner(monitor=CountingMonitor())
    runner.measure(config("honest"))
    yield runner
    runner.close()


def group_of(runner: GpuRunner) -> int:
    assert runner._worker.pid is not None
    return runner._worker.pid


def members(group: int) -> list[str]:
    """The processes of a process group, zombies apart."""
    listing = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listing.splitlines()]
    return [row[2] for row in rows if row[0] == str(group) and not row[1].startswith("Z")]


def test_a_right_config_is_timed_against_the_anchor(runner: GpuRunner) -> None:
    first = runner.measure(config("honest"))
    second = runner.measure(config("honest", 128))
    assert first.outcome is second.outcome is Outcome.OK
    assert runner.anchor == config("honest")
    assert first.relative_to_anchor == 1.0
    assert second.relative_to_anchor is not None
    assert 0.05 < second.relative_to_anchor < 20
    assert second.time_us == pytest.approx(statistics.median(second.samples_us))
    assert second.seconds > 0
    assert second.telemetry.sm_clock_mhz is not None
    assert runner.measure(config("honest")).relative_to_anchor == 1.0  # measured again it is the anchor still


def test_the_gpu_is_sampled_from_the_first_round_to_the_last_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = CountingMonitor()
    monkeypatch.setattr("blocktune.tuner.measure.load.time", SimpleNamespace(monotonic=monitor.monotonic))
    runner = new_runner(monitor=monitor, terms=Terms(race=False))
    try:
        brief = runner.measure(config("honest"))
        assert brief.telemetry.power_w is None, "shorter than NVML's power is averaged over"
        before = monitor.samples
        slow = runner.measure(config("slow"))
        ended = time.monotonic()
    finally:
        runner.close()
    taken = monitor.samples - before
    assert slow.outcome is Outcome.OK, slow.error
    assert slow.telemetry.power_w == pytest.approx(500.0, rel=1e-3)
    assert taken > 10
    assert slow.telemetry.sm_clock_mhz == pytest.approx(1000 + before + taken / 2, abs=2), "the middle of the rounds"
    assert ended - monitor.last_sampled > 0.4, "two checks follow the rounds"
    assert monitor.samples == before + taken


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kernel", "outcome", "words"),
    [
        ("nan", Outcome.WRONG_RESULT, "not finite"),
        ("untouched", Outcome.WRONG_RESULT, "not finite"),
        ("wrong_second", Outcome.WRONG_RESULT, "relative error"),
        ("wrong_late", Outcome.WRONG_RESULT, "after timing"),
        ("raises", Outcome.RUN_ERROR, "no such instruction"),
        ("oversized", Outcome.RUN_ERROR, "no room"),
        ("too_large", Outcome.INFEASIBLE, "shared memory"),
    ],
)
def test_a_failure_without_a_crash_keeps_the_worker(
    runner: GpuRunner, kernel: str, outcome: Outcome, words: str
) -> None:
    runner.measure(config("honest"))
    before = group_of(runner)
    measurement = runner.measure(config(kernel))
    assert measurement.outcome is outcome
    assert words in measurement.error
    assert measurement.time_us is None
    assert group_of(runner) == before


@pytest.mark.parametrize(
    ("kernel", "words", "transient"),
    [
        ("full_disk", "No space left", True),
        ("killed", "SIGKILL", True),
        ("oversized", "no room", True),
        ("raises", "no such", False),
        ("nan", "", False),
    ],
)
def test_what_the_machine_is_to_blame_for_may_do_well_later(
    runner: GpuRunner, kernel: str, words: str, transient: bool
) -> None:
    measurement = runner.measure(config(kernel))
    assert words in measurement.error
    assert (measurement.outcome is Outcome.OK, measurement.transient) == (False, transient)
    confirmed = runner.confirm(config(kernel))
    assert (confirmed.outcome is Outcome.OK, confirmed.transient) == (False, transient)


def test_one_worker_serves_one_shape_after_the_other() -> None:
    longer = dataclasses.replace(SHAPE, seqlen_k=112)
    runner = new_runner()
    runner.measure(config("honest"))
    worker = group_of(runner)
    runner.turn_to(longer)
    again = runner.measure(config("honest"))
    assert group_of(runner) == worker
    assert (runner.shape, again.outcome, again.relative_to_anchor) == (longer, Outcome.OK, 1.0)
    runner.turn_to(SHAPE, anchor=config("slow"), terms=Terms(seed=7, race=False))
    assert (runner.anchor, runner.terms.seed) == (config("slow"), 7)
    assert runner.measure(config("honest")).relative_to_anchor < 1.0
    assert group_of(runner) == worker
    runner.close()


def test_what_a_kernel_prints_is_no_answer(runner: GpuRunner) -> None:
    assert runner.measure(config("chatty")).outcome is Outcome.OK


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kernel", "outcome", "words"),
    [
        ("segfault", Outcome.RUN_ERROR, "SIGSEGV"),
        ("abort", Outcome.RUN_ERROR, "SIGABRT"),
        ("exit", Outcome.RUN_ERROR, "exit status 0"),
        ("hang", Outcome.RUN_TIMEOUT, "while running"),
        ("slow_to_compile", Outcome.COMPILE_TIMEOUT, "while compiling"),
    ],
)
def test_a_crash_costs_one_candidate(runner: GpuRunner, kernel: str, outcome: Outcome, words: str) -> None:
    runner.measure(config("honest"))
    lost = group_of(runner)
    measurement = runner.measure(config(kernel))
    assert measurement.outcome is outcome
    assert words in measurement.error
    assert members(lost) == []
    assert runner.measure(config("honest", 32)).outcome is Outcome.OK
    assert runner.anchor == config("honest")


def test_an_anchor_that_fails_is_given_up() -> None:
    runner = new_runner(anchor=config("segfault"))
    try:
        measurement = runner.measure(config("honest"))
        assert measurement.outcome is Outcome.OK
        assert measurement.relative_to_anchor == 1.0
        assert runner.anchor == config("honest")
    finally:
        runner.close()


def test_finals_are_paired_and_name_who_failed(runner: GpuRunner) -> None:
    good = [config("honest"), config("rival"), config("honest", 128)]
    finals = runner.finals(good)
    assert set(finals.samples_us) == set(good)
    assert len({len(samples) for samples in finals.samples_us.values()}) == 1
    finals = runner.finals([config("honest"), config("abort")])
    assert set(finals.samples_us) == {config("honest")}
    assert finals.failures[config("abort")].outcome is Outcome.RUN_ERROR


def test_a_config_can_meet_itself(runner: GpuRunner) -> None:
    one, other = runner.duel(config("honest"))
    assert len(one) == len(other) > 0
    assert one != other
    with pytest.raises(BlocktuneError, match=r"cannot be compared with itself: .* no such instruction"):
        runner.duel(config("raises"))


def test_energies_come_in_rounds_and_a_lost_worker_costs_them_alone(
    runner: GpuRunner, caplog: pytest.LogCaptureFixture
) -> None:
    configs = [config("honest"), config("honest", 128)]
    energies = runner.energies(configs, 2)
    assert [len(energies.bursts[each]) for each in configs] == [2, 2]
    # the fake GPU draws 500 W by the time on the wall, and a busy machine sees its steps late
    assert [energies.power_w(each) for each in configs] == pytest.approx([500.0] * 2, rel=0.3)
    assert runner.energies([config("raises")], 1).bursts == {}
    assert "No energies of launches: " in caplog.text
    assert runner.measure(config("honest")).outcome is Outcome.OK


def test_the_log_sum_exp_is_confirmed(runner: GpuRunner) -> None:
    assert runner.measure(config("wrong_lse")).outcome is Outcome.OK  # timing does not ask for it
    assert "log-sum-exp" in runner.confirm(config("wrong_lse")).error
    assert runner.confirm(config("honest")).outcome is Outcome.OK


CALM, SHARED, HOT = Telemetry(throttle_reasons=0x04), Telemetry(other_processes=1), Telemetry(throttle_reasons=0x44)


class ScriptedRunner(GpuRunner):
    """A runner whose worker always answers, while the GPU is in one state after the other."""

    def script(self, *states: Telemetry) -> "ScriptedRunner":
        self.states, self.asked, self._is_set_up = list(states), 0, True
        self.monitor = SimpleNamespace(sample=self.next_state, energy_j=lambda: None)  # type: ignore[assignment]
        return self

    def next_state(self) -> Telemetry:
        return self.states.pop(0)

    def _ensure_ready(self) -> None:
        """There is nothing to start."""

    def _ask(self, command: dict[str, Any], running_seconds: float) -> dict[str, Any]:
        self.asked += 1
        self._worker.telemetry = self.next_state()
        if command["command"] == "finals":
            return {"samples_us": [[float(self.asked)] * 3 for _ in command["configs"]]}
        return Measurement(
            outcome=Outcome.OK, time_us=1.0, relative_to_anchor=1.0, samples_us=(float(self.asked),)
        ).to_json()


def test_what_was_disturbed_is_measured_once_more() -> None:
    runner = ScriptedRunner(SHAPE).script(CALM, SHARED, CALM, HOT, HOT)
    calm, repeated, marked = (runner.measure(config("honest", block)) for block in (32, 64, 128))
    assert (calm.samples_us, calm.error) == ((1.0,), "")
    assert (repeated.samples_us, repeated.telemetry) == ((3.0,), CALM)
    assert repeated.error == "measured twice, since another process was on the GPU"
    assert (marked.samples_us, marked.telemetry) == ((5.0,), HOT)
    assert marked.error == "measured twice, since the GPU slowed itself down; again the GPU slowed itself down"


def test_nothing_is_repeated_for_ever() -> None:
    runner = ScriptedRunner(SHAPE).script(*[SHARED] * 8, CALM, SHARED, CALM)
    errors = [runner.measure(config("honest", 16 * block)).error for block in range(1, 8)]
    assert [error.startswith(REPEATED) for error in errors] == [True] * 3 + [False] * 3 + [True]
    assert errors[3] == "disturbed, since another process was on the GPU"
    assert errors[5] == ""
    assert runner.states == []


def test_finals_that_were_disturbed_are_held_once_more() -> None:
    finalists = [config("honest"), config("rival")]
    calm = ScriptedRunner(SHAPE).script(CALM, CALM).finals(finalists)
    assert (calm.disturbance, set(calm.samples_us.values())) == ("", {(1.0,) * 3})
    late = ScriptedRunner(SHAPE).script(CALM, SHARED, CALM, CALM).finals(finalists)
    assert late.disturbance == "measured twice, since another process was on the GPU"
    assert set(late.samples_us.values()) == {(2.0,) * 3}
    lasting = ScriptedRunner(SHAPE).script(CALM, SHARED, HOT, HOT).finals(finalists)
    assert lasting.disturbance.endswith("; again the GPU slowed itself down")


def test_a_shape_too_large_is_a_usage_error() -> None:
    runner = new_runner(shape=dataclasses.replace(SHAPE, batch=7777))
    with pytest.raises(UsageError, match="must fit the GPU's free memory"):
        runner.measure(config("honest"))
    runner.close()


def test_a_worker_that_cannot_start_is_an_error() -> None:
    runner = new_runner(command=(sys.executable, "-c", "raise SystemExit('no CUDA here')"))
    with pytest.raises(BlocktuneError, match="no CUDA here"):
        runner.measure(config("honest"))
    runner.close()


@pytest.mark.exhaustive
def test_the_worker_dies_with_a_parent_that_is_killed() -> None:
    code = (
        f"from {__name__} import *\n"
        "runner = new_runner(); runner.measure(config('honest')); print(group_of(runner), flush=True)\n"
        "runner.deadlines = Deadlines(running=600); runner.measure(config('hang'))"
    )
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        time.sleep(0.5)
        parent.kill()
    deadline = time.monotonic() + 60
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert members(group) == []

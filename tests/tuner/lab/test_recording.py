"""Sweeps of many shapes with one worker: what is measured of a large space, and what is kept when the time ends."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from blocktune.db.records.records import Outcome
from blocktune.kernels import registry
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import competing
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.starting_configs import find_contenders
from blocktune.tuner.lab.recording import SweepRecorder, dense_part
from blocktune.tuner.lab.replay import ReplayRunner
from blocktune.tuner.measure.measurement import Measurement
from tests.support.models import landscape

pytestmark = pytest.mark.triton_free

DECODE = AttentionShape(batch=4, num_heads=32, num_heads_kv=8, seqlen_q=1, seqlen_k=8192, head_dim=128, head_dim_v=128)
H200 = device_named("h200")
LONGER = dataclasses.replace(landscape.SHAPE, seqlen_k=16384)


class TurningRunner(ReplayRunner):
    """A replay that notes which shapes it was turned to."""

    def __init__(self) -> None:
        super().__init__(landscape.measurements(0))
        self.turns: list[AttentionShape] = []

    def turn_to(self, shape: AttentionShape) -> None:
        self.turns.append(shape)


class AnyShapeCompiler(landscape.InstantCompiler):
    """Compiles a shape as if it were that of the landscape."""

    def submit(self, kernel: str, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]) -> Any:
        del shape
        return super().submit(kernel, config, landscape.SHAPE, cc)


@pytest.fixture
def _synthetic_kernels() -> Iterator[None]:
    with landscape.registered():
        yield


def recorder(runner: Any, most: int) -> SweepRecorder:
    return SweepRecorder(
        device=landscape.DEVICE,
        environment=landscape.SUBJECT.environment,
        runner=runner,
        compiler=AnyShapeCompiler(),
        kernels=tuple(landscape.KERNELS.values()),
        most=most,
    )


def parts(most: int) -> tuple[Sequence[KernelConfig], Sequence[KernelConfig]]:
    contenders = find_contenders(DECODE, H200, competing(), ())
    return dense_part(contenders, DECODE, H200, most), contenders.space.feasible


def test_a_small_space_is_measured_whole() -> None:
    part, feasible = parts(10_000)
    assert set(part) == set(feasible)


def test_a_dense_part_begins_with_the_default_and_has_every_kernel_and_number_of_splits() -> None:
    part, feasible = parts(200)
    assert len(part) == len(set(part)) == 200
    assert part[0] == find_contenders(DECODE, H200, competing(), ()).untuned
    assert registry.kernels_for(DECODE, H200.limits)[0].default_config(DECODE, H200.limits) in part
    assert {config.kernel for config in part} == {config.kernel for config in feasible}
    of_decode = [config.parameters["splits"] for config in part if config.kernel == "flash_decode"]
    assert set(of_decode) == set(registry.get_kernel("flash_decode").parameters["splits"])


@pytest.mark.usefixtures("_synthetic_kernels")
def test_every_shape_gets_a_sweep_of_one_worker() -> None:
    runner = TurningRunner()
    sweeps = list(recorder(runner, 40).record([landscape.SHAPE, LONGER], seconds=60))
    assert runner.turns == [sweep.shape for sweep in sweeps] == [landscape.SHAPE, LONGER]
    assert all(len(sweep.trials) == 40 for sweep in sweeps)
    measured = {trial.config: trial for trial in sweeps[0].trials if trial.outcome is Outcome.OK}
    expected = landscape.measurements(0)
    assert len(measured) > 30
    assert all(trial.time_us == expected[config].time_us for config, trial in measured.items())


@pytest.mark.usefixtures("_synthetic_kernels")
def test_what_was_measured_when_the_time_ends_is_a_sweep() -> None:
    class Clocked(TurningRunner):
        """Takes all of the time with its third measurement."""

        def measure(self, config: KernelConfig) -> Measurement:
            if len(self.measured) == 2:
                monkey.setattr("blocktune.tuner.lab.recording.time.monotonic", lambda: 1e9)
            return super().measure(config)

    with pytest.MonkeyPatch.context() as monkey:
        (sweep,) = recorder(Clocked(), 40).record([landscape.SHAPE, LONGER], seconds=60)
    timed = [trial for trial in sweep.trials if trial.time_us is not None]
    assert len(timed) == 3

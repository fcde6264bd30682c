"""The worker on a real GPU: real kernels are right and timed, planted faults cost one candidate each."""

import statistics
import time
from collections.abc import Iterator

import pytest
import torch

from blocktune.db.records.records import Outcome, Regime
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.lab.noise import study_noise
from blocktune.tuner.lab.noise_report import summarize
from blocktune.tuner.measure.clock import CudaClock
from blocktune.tuner.measure.measurement import Terms
from blocktune.tuner.measure.runner import GpuRunner
from blocktune.tuner.measure.telemetry import GpuMonitor
from blocktune.tuner.measure.worker_process import Deadlines
from blocktune.tuner.search.verdict import speedup
from tools import program

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
WORKER = program("workers.planted_worker")
SHAPE = complete_shape(1024, 64, batch=2, heads=8, causal=True)


@pytest.fixture(scope="module")
def runner() -> Iterator[GpuRunner]:
    monitor = GpuMonitor(current_device().uuid, own_processes=1)
    runner = GpuRunner(SHAPE, command=WORKER, monitor=monitor, deadlines=Deadlines(running=10.0))
    yield runner
    runner.close()


def able() -> list[AttentionKernel]:
    """The kernels that compute the shape here, the historical ones among them."""
    limits = current_device().limits
    return [kernel for kernel in KERNELS.values() if kernel.unsupported(SHAPE, limits) is None]


def default_of(kernel: AttentionKernel) -> KernelConfig:
    return kernel.default_config(SHAPE, current_device().limits)


def planted(name: str) -> KernelConfig:
    return KernelConfig(name, 64, 64, 4, 2)


@pytest.mark.parametrize("name", list(KERNELS))
def test_every_kernel_s_default_is_right_and_timed(runner: GpuRunner, name: str) -> None:
    reason = KERNELS[name].unsupported(SHAPE, current_device().limits)
    if reason is not None:
        pytest.skip(reason)
    config = default_of(KERNELS[name])
    measurement = runner.measure(config)
    assert measurement.outcome is Outcome.OK, measurement.error
    assert measurement.time_us is not None
    assert 2 < measurement.time_us < 5000
    assert runner.confirm(config).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("illegal_access", Outcome.RUN_ERROR),
        ("endless_loop", Outcome.RUN_TIMEOUT),
        ("wrong_result", Outcome.WRONG_RESULT),
    ],
)
def test_a_planted_fault_costs_one_candidate(runner: GpuRunner, name: str, outcome: Outcome) -> None:
    honest = default_of(able()[0])
    assert runner.measure(honest).outcome is Outcome.OK
    measurement = runner.measure(planted(name))
    assert measurement.outcome is outcome, measurement.error
    assert runner.measure(honest).outcome is Outcome.OK


def test_equal_launches_take_equal_time_in_the_finals(runner: GpuRunner) -> None:
    configs = [default_of(kernel) for kernel in able()]
    finals = runner.finals(configs)
    assert set(finals.samples_us) == set(configs)
    again = runner.finals(configs)
    for config in configs:
        first, second = (sorted(found.samples_us[config]) for found in (finals, again))
        assert second[len(second) // 2] == pytest.approx(first[len(first) // 2], rel=0.1)


def test_both_regimes_time_the_same_config_alike() -> None:
    config = default_of(able()[0])
    medians = {}
    for regime in Regime:
        monitor = GpuMonitor(current_device().uuid, own_processes=2)  # this process may be on the GPU, too
        runner = GpuRunner(SHAPE, monitor=monitor, terms=Terms(regime=regime))
        try:
            assert runner.measure(config).outcome is Outcome.OK
            one, other = runner.duel(config)
        finally:
            runner.close()
        assert not speedup(one, other).beyond_noise
        medians[regime] = statistics.median(one)
    assert medians[Regime.BURST] == pytest.approx(medians[Regime.SUSTAINED], rel=0.4)


def test_a_short_study_of_the_noise_ends_in_time_and_is_sane() -> None:
    monitor = GpuMonitor(current_device().uuid, own_processes=len(Regime) + 1)
    runners = {regime: GpuRunner(SHAPE, monitor=monitor, terms=Terms(regime=regime, race=False)) for regime in Regime}
    try:
        study = study_noise(runners, [default_of(kernel) for kernel in able()], seconds=60.0)
    finally:
        for runner in runners.values():
            runner.close()
    summary = summarize(study)
    assert study.seconds < 75
    assert set(summary["regimes"]) == set(Regime)
    for found in summary["regimes"].values():
        assert found["candidates"]["count"] >= len(study.configs)
        assert 0.8 < found["finals"]["ratio"]["low"] <= found["finals"]["ratio"]["high"] < 1.25
    assert summary["tie_band"] < 0.05


def test_the_energy_of_a_launch_repeats_and_its_power_is_one_that_the_card_can_draw() -> None:
    monitor = GpuMonitor(current_device().uuid, own_processes=1)
    if monitor.energy_j() is None:
        pytest.skip("this GPU does not tell its energy")
    shape = complete_shape(8192, 64, batch=2, causal=True)
    config = KERNELS["flash_fwd"].default_config(shape, current_device().limits)
    runner = GpuRunner(shape, monitor=monitor)
    try:
        assert runner.measure(config).outcome is Outcome.OK
        energies = runner.energies([config], 4)
    finally:
        runner.close()
    found = [burst.energy_mj for burst in energies.bursts[config]]
    power_w = energies.power_w(config)
    assert power_w is not None
    assert 0.2 * monitor.power_limit_w < power_w < 1.05 * monitor.power_limit_w
    assert max(found) < 1.1 * min(found)


def test_launch_overhead_does_not_leak_into_short_kernels() -> None:
    """A kernel that writes one element takes about as long on the GPU however slowly the host launches it."""
    out = torch.empty(1, device="cuda")

    def slow_to_launch() -> None:
        time.sleep(200e-6)
        out.zero_()

    clock = CudaClock()
    clock.heat(out.zero_, 0.05)
    rounds = clock.rounds([out.zero_, slow_to_launch], 20)
    quick, slow = (sorted(row[index] for row in rounds)[10] for index in (0, 1))
    assert slow < quick + 20

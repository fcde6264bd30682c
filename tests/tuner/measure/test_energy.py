"""The energy of a launch on a GPU that is simulated: what it draws is known, and its counter moves in steps."""

from collections.abc import Callable

import pytest

from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.measure.bench import Bench
from blocktune.tuner.measure.energy import BURST_SECONDS, LEAD_SECONDS, Burst, EnergyMeter
from blocktune.tuner.measure.measurement import Energies, Terms
from tests.tuner.measure.test_shape_bench import KnownClock, Right, bench_of

pytestmark = pytest.mark.triton_free

IDLE_W = 100.0


class Kernel:
    """A launch that takes `time_us` and draws `power_w`."""

    def __init__(self, time_us: float, power_w: float) -> None:
        self.time_us, self.power_w = time_us, power_w

    def __call__(self) -> None:
        """Takes no time here; the GPU knows what it would."""


class Gpu:
    """Works off its queue while the host looks at the clock, which takes 0.2 ms.

    Args:
        step_seconds: between two steps of the counter.
        knows_energy: whether it has a counter.
    """

    def __init__(self, step_seconds: float = 0.1, *, knows_energy: bool = True) -> None:
        self.seconds, self.joules, self.shown = 0.0, 5e5, 5e5
        self.step_seconds, self.knows_energy = step_seconds, knows_energy

        self.queue: list[list[float]] = []
        self.idle_seconds = 0.0

    def now(self) -> float:
        self._advance(2e-4)
        return self.seconds

    def energy_j(self) -> float | None:
        return self.shown if self.knows_energy else None

    def enqueue(self, launch: Callable[[], None], count: int) -> Callable[[], bool]:
        assert isinstance(launch, Kernel)
        batch = [1e-6 * launch.time_us * count, launch.power_w]
        self.queue.append(batch)
        return lambda: batch[0] <= 0

    def synchronize(self) -> None:
        while self.queue:
            self._advance(1e-3)

    def _advance(self, seconds: float) -> None:
        before = self.seconds
        self.seconds += seconds
        while seconds > 0:
            if not self.queue:
                self.idle_seconds += seconds
                self.joules += seconds * IDLE_W
                break
            worked = min(seconds, self.queue[0][0])
            self.joules += worked * self.queue[0][1]
            self.queue[0][0] -= worked
            seconds -= worked
            if self.queue[0][0] <= 0:
                self.queue.pop(0)
        if self.seconds // self.step_seconds > before // self.step_seconds:
            self.shown = round(self.joules, 3)


@pytest.mark.parametrize(
    ("time_us", "power_w"), [(20.0, 350.0), (1900.0, 680.0), (30_000.0, 500.0), (400_000.0, 600.0)]
)
def test_the_energy_of_a_launch_is_its_power_times_its_time(time_us: float, power_w: float) -> None:
    gpu = Gpu()
    burst = EnergyMeter(gpu, gpu.energy_j, gpu.now).burst(Kernel(time_us, power_w), 1.2 * time_us)
    assert burst is not None
    assert burst.time_us == pytest.approx(time_us, rel=0.01)
    assert burst.power_w == pytest.approx(power_w, rel=0.01)
    assert burst.energy_mj == pytest.approx(time_us * power_w / 1e3, rel=0.01)
    assert gpu.seconds > LEAD_SECONDS + BURST_SECONDS
    assert gpu.idle_seconds < 2e-3, "the GPU waits for the host"
    assert not gpu.queue


def test_the_work_of_the_contender_before_is_not_counted() -> None:
    gpu = Gpu()
    meter = EnergyMeter(gpu, gpu.energy_j, gpu.now)
    meter.burst(Kernel(100.0, 700.0), 100.0)
    burst = meter.burst(Kernel(100.0, 200.0), 100.0)
    assert burst is not None
    assert burst.power_w == pytest.approx(200.0, rel=0.01)


def test_a_gpu_without_a_counter_or_with_one_that_rests_has_no_energy() -> None:
    for gpu in (Gpu(knows_energy=False), Gpu(step_seconds=1e9)):
        assert EnergyMeter(gpu, gpu.energy_j, gpu.now).burst(Kernel(100.0, 700.0), 100.0) is None
        assert gpu.seconds < 2
        assert not gpu.queue


KERNELS = {
    KernelConfig("flash_fwd", 16, 16, 4, stages): Kernel(time_us, power_w)
    for stages, time_us, power_w in ((1, 100.0, 700.0), (2, 110.0, 500.0))
}


def bench(gpu: Gpu, meter: EnergyMeter | None) -> Bench:
    clock = KnownClock({kernel: kernel.time_us for kernel in KERNELS.values()})
    return bench_of(Right(), KERNELS, clock, Terms(), meter)


def test_configs_burst_in_turns() -> None:
    gpu, stages = Gpu(), list[str]()
    fast, frugal = bench(gpu, EnergyMeter(gpu, gpu.energy_j, gpu.now)).energies(list(KERNELS), 3, stages.append)
    assert len(fast) == len(frugal) == 3
    for one, other in zip(fast, frugal, strict=True):
        assert one.time_us < other.time_us
        assert other.energy_mj == pytest.approx(55.0, rel=0.01)
        assert one.energy_mj == pytest.approx(70.0, rel=0.01)
    assert stages == ["running", "running", "timing", "checking"]


def test_a_bench_without_a_counter_has_no_energies() -> None:
    gpu = Gpu(knows_energy=False)
    for meter in (None, EnergyMeter(gpu, gpu.energy_j, gpu.now)):
        assert bench(gpu, meter).energies(list(KERNELS), 3, lambda stage: None) == []


def test_energies_are_medians_of_their_bursts() -> None:
    first, second = KERNELS
    bursts = tuple(Burst(energy_mj=energy_mj, time_us=100.0) for energy_mj in (50.0, 70.0, 60.0))
    energies = Energies(bursts={first: bursts})
    assert (energies.energy_mj(first), energies.power_w(first)) == (60.0, 600.0)
    assert (energies.energy_mj(second), energies.power_w(second), energies.energy_mj(None)) == (None, None, None)

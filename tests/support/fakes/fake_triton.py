"""A GPU for Triton that launches nothing: kernels are specialised and compiled for an H200, and a launch is noted.

A launch "takes" what the test says, and "does" what the test says with its arguments.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from triton.runtime.driver import driver

from blocktune.kernels.base.kernel import Thunk
from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.tuner.measure.clock import HookedLaunch
from blocktune.tuner.measure.protocol import Rounds, rotated_order
from blocktune.tuner.offline.stand_in_driver import StandInDriver


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: the kernel's name, its grid, warps and stages, and its arguments by name, constants included."""

    name: str
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    arguments: dict[str, Any]


@dataclass
class FakeGpu(StandInDriver):
    """Stands where Triton's driver stands. time_us: how long a launch takes. effect: what it does."""

    time_us: Callable[[Launch], float] = lambda launch: 100.0
    effect: Callable[[Launch], None] = lambda launch: None
    launches: list[Launch] = field(default_factory=list)
    timed: list[Launch] = field(default_factory=list)
    device: DeviceSpec = field(default_factory=lambda: device_named("h200"))

    def get_current_device(self) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Return what Triton's own tuner times launches with, in milliseconds."""

        def bench(launch: Thunk, quantiles: Sequence[float]) -> list[float]:
            launch()
            self.timed.append(self.launches[-1])
            return [self.time_us(self.launches[-1]) / 1e3] * len(quantiles)

        return bench

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        names = src.fn.arg_names

        def launch(x: int, y: int, z: int, stream: int, *rest: Any) -> None:
            made = Launch(
                src.fn.__name__,
                (x, y, z),
                metadata.num_warps,
                metadata.num_stages,
                dict(zip(names, rest[5:], strict=True)),
            )
            gpu: Any = driver.active  # code outlives the GPU that it was loaded on
            gpu.launches.append(made)
            gpu.effect(made)

        return launch


class FakeHookedClock:
    """Takes the times that a fake GPU says, and notes which launches it timed."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def heat(self, launch: Thunk, seconds: float) -> None:
        """It is warm."""

    def rounds(self, launches: Sequence[Thunk], count: int) -> Rounds:
        return tuple(self._round(launches, number) for number in range(count))

    def loaded_rounds(self, launches: Sequence[Thunk], seconds: float) -> Rounds:
        return self.rounds(launches, 1)

    def synchronize(self) -> None:
        """Nothing is on its way."""

    def _round(self, launches: Sequence[Thunk], number: int) -> tuple[float, ...]:
        times = {}
        for index in rotated_order(len(launches), number):
            launch = launches[index]
            assert isinstance(launch, HookedLaunch)
            launch.before()
            launch()
            made = self._gpu.launches[-1]
            self._gpu.timed.append(made)
            times[index] = self._gpu.time_us(made)
            launch.after()
        return tuple(times[index] for index in range(len(launches)))


@contextmanager
def active(gpu: FakeGpu) -> Iterator[FakeGpu]:
    """Let Triton take this for the machine's GPU."""
    before = driver._active
    driver.set_active(gpu)  # type: ignore[arg-type]
    try:
        yield gpu
    finally:
        driver._active = before

"""A worker as `blocktune.tuner.measure.worker`, with the fake kernels on the CPU in place of a GPU."""

import time
from collections.abc import Callable, Sequence

import torch

from blocktune.kernels.base.kernel import Thunk
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.measure.bench import ShapeBench
from blocktune.tuner.measure.energy import EnergyMeter
from blocktune.tuner.measure.measurement import Terms
from blocktune.tuner.measure.protocol import Rounds, rotated_order
from blocktune.tuner.measure.worker import attention_commands, serve
from tests.support.fakes import fake_kernels

POWER_W, STEP_SECONDS = 500.0, 0.05


class CpuQueue:
    """Has done what is enqueued when it returns."""

    def enqueue(self, launch: Thunk, count: int) -> Callable[[], bool]:
        for _ in range(count):
            launch()
        return lambda: True

    def synchronize(self) -> None:
        """Nothing runs behind."""


class WallClock:
    """Takes times on the CPU, in the order of the protocol, without heating or flushing."""

    def heat(self, launch: Thunk, seconds: float) -> None:
        del seconds
        launch()

    def rounds(self, launches: Sequence[Thunk], count: int) -> Rounds:
        return tuple(self._round(launches, number) for number in range(min(count, 3)))

    def synchronize(self) -> None:
        """Nothing runs behind."""

    def _round(self, launches: Sequence[Thunk], number: int) -> tuple[float, ...]:
        times = [0.0] * len(launches)
        for index in rotated_order(len(launches), number):
            start = time.perf_counter()
            launches[index]()
            times[index] = 1e6 * (time.perf_counter() - start)
        return tuple(times)


def make_bench(shape: AttentionShape, terms: Terms) -> ShapeBench:
    if shape.batch == 7777:
        raise torch.OutOfMemoryError("tried to allocate 800 GiB")
    return ShapeBench(
        shape,
        device="cpu",
        clock=WallClock(),
        kernels=fake_kernels.KERNELS.__getitem__,
        terms=terms,
        meter=EnergyMeter(CpuQueue(), lambda: POWER_W * (time.perf_counter() // STEP_SECONDS) * STEP_SECONDS),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads that wait for a processor of a busy machine would be timed, too
    serve(attention_commands(make_bench))

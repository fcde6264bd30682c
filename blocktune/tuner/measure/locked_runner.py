"""A runner on a GPU that is locked against other tuning runs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.measure.device_choice import visible
from blocktune.tuner.measure.measurement import Terms
from blocktune.tuner.measure.runner import GpuRunner, WorkerRunner
from blocktune.tuner.measure.telemetry import GpuMonitor, gpu_lock

AnyRunner = TypeVar("AnyRunner", bound=WorkerRunner[Any])


@contextlib.contextmanager
def gpu_runner(
    shape: AttentionShape, device: DeviceSpec, monitor: GpuMonitor, on_wait: Callable[[str], None], terms: Terms
) -> Iterator[GpuRunner]:
    """Yield a runner of one shape on a GPU that is here, which is locked meanwhile. It can turn to other shapes.

    Args:
        shape: the first one.
        device: the GPU.
        monitor: watches it.
        on_wait: called with a message before it has to wait for the GPU.
        terms: on which the shape is measured.
    """
    with locked(GpuRunner(shape, environment=visible(device), monitor=monitor, terms=terms), device, on_wait) as runner:
        yield runner


@contextlib.contextmanager
def locked(runner: AnyRunner, device: DeviceSpec, on_wait: Callable[[str], None]) -> Iterator[AnyRunner]:
    """Yield a runner on a GPU that is locked meanwhile, and close it."""
    with gpu_lock(device.uuid, on_wait):
        try:
            yield runner
        finally:
            runner.close()

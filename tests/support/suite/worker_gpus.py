"""Which GPU a worker process of pytest-xdist takes first, so that a suite uses all GPUs of a machine."""

import os
from collections.abc import Sequence

from blocktune.kernels.hardware.nvml import Nvml

VISIBLE, WORKER = "CUDA_VISIBLE_DEVICES", "PYTEST_XDIST_WORKER"


def take_turns() -> None:
    """Put another GPU first in each worker. Must run before the first call of CUDA; what the user chose stays."""
    worker = os.environ.get(WORKER)
    if worker is None or VISIBLE in os.environ:
        return
    uuids = _uuids()
    if len(uuids) > 1:
        os.environ[VISIBLE] = ",".join(in_turn(uuids, int(worker.removeprefix("gw"))))


def in_turn(uuids: Sequence[str], worker: int) -> list[str]:
    """Return all GPUs, from the worker's on."""
    first = worker % len(uuids)
    return [*uuids[first:], *uuids[:first]]


def _uuids() -> list[str]:
    nvml = Nvml.open()
    if nvml is None:
        return []
    try:
        return [gpu.uuid for gpu in nvml.gpus() if gpu.uuid is not None]
    finally:
        nvml.close()

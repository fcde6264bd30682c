"""Processes that compile for a search: who they are, and how far they go ahead of the measuring."""

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.tuner.compile.farm import CompileFarm, default_workers
from blocktune.tuner.measure.device_choice import is_present

LEAST_AHEAD = 2
"""Compiled configs that wait for the GPU while few processes compile."""


def farm_for(device: DeviceSpec) -> CompileFarm:
    """Return the workers that compile for a run. For a device that is here their code must be at hand, and one
    processor is left to the host, which must stay ahead of the GPU."""
    present = is_present(device)
    return CompileFarm(workers=max(1, default_workers() - present), need_code=present)


def compiled_ahead(workers: int) -> int:
    """Return how many configs may be compiled or compiling ahead of the measuring: enough that no process waits, but
    not all of a search, whose later configs are chosen by what was measured."""
    return workers + max(LEAST_AHEAD, workers // 2)

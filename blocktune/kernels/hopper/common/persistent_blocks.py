"""What a launch of persistent blocks needs: how many of them a GPU has room for, and a counter of their tiles."""

import functools
from typing import Any

from blocktune.kernels.base.direct_launch import recorder
from blocktune.kernels.hardware.limits import MULTIPROCESSORS

_counters: dict[tuple[int, int], Any] = {}


@functools.cache
def multiprocessors() -> int:
    """Return how many the current GPU has; where there is no GPU to query, how many a large one has."""
    import torch

    if not torch.cuda.is_available():
        return MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def tile_counter(device: Any) -> Any:
    """Return two zeros for one launch.

    Launches of a stream follow each other and leave zeros, so they share a pair. A CUDA graph may run at the same time
    as its stream and gets a pair of its own.
    """
    import torch

    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(2, dtype=torch.int32, device=device)
    if recorder.current is not None:
        recorder.current.found((found,), lambda: (tile_counter(device),))
    return found

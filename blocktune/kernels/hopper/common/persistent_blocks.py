"""What a launch of persistent blocks needs: how many of them a GPU has room for, and a counter of their tiles."""

import functools
from typing import Any

from blocktune.kernels.hardware.limits import MULTIPROCESSORS
from blocktune.kernels.portable.decode.scratch import scratch


@functools.cache
def multiprocessors() -> int:
    """Return how many the current GPU has; where there is no GPU to query, how many a large one has."""
    import torch

    if not torch.cuda.is_available():
        return MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def tile_counter(device: Any) -> Any:
    """Return two zeros for one launch, which must leave zeros."""
    return scratch(device, 2)[1]

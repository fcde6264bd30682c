"""A config whose number of splits the caller fixes: for batch invariance, not for speed."""

from collections.abc import Iterator
from dataclasses import replace

from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.portable.decode.launch import EARLY, LATE
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.selection.ladder import Candidate, Rejection, Rung
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import AttentionShape

DECODING, SHORT_DECODING = "flash_decode", "flash_decode8"
"""Every program of them computes its rows alone, and the second launch merges the splits in their order."""
FORWARD = "flash_fwd_general"
"""Its default tiles depend on head dimensions and features alone; it splits no keys."""

MANY_KEYS = 1 << 16
"""With as many or more, the tiles of a default no longer depend on the number of keys."""


def fixed_splits(shape: AttentionShape, num_splits: int, limits: ComputeLimits) -> Iterator[Candidate | Rejection]:
    """Yield the config with this number of splits, or why there is none: the default of this shape with a batch of one
    and many keys, whatever was measured. A row is then computed in the same steps whatever else is in the batch, and
    however long a cache the longest entry needs. Without a cache there are no splits."""
    name = _name(shape)
    kernel = get_kernel(name)
    alone = replace(shape, batch=1, seqlen_k=max(shape.seqlen_k, MANY_KEYS))
    problem = kernel.unsupported(shape, limits)
    if problem is None:
        config = kernel.default_config(alone, limits)
        if shape.features.cached:
            overlap = min(config.parameters["overlap"], EARLY) if num_splits > 1 else LATE  # one merge for every number
            config = KernelConfig.of(kernel.name, {**config.parameters, "splits": num_splits, "overlap": overlap})
        problem = next(iter(kernel.violations(config, shape, limits)), None)
    if problem is not None:
        yield Rejection(Rung.DEFAULT, problem)
    else:
        yield Candidate(rung=Rung.DEFAULT, config=config, origin=Origin.DEFAULT)


def _name(shape: AttentionShape) -> str:
    """Return the kernel that computes the shape."""
    if not shape.features.cached:
        return FORWARD
    return SHORT_DECODING if shape.features.is_short else DECODING

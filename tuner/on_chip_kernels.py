"""The on-chip budget of a config, whichever kernel it is of."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from blocktune.kernels.config import KernelConfig
from blocktune.kernels.flash_fwd import FlashForward
from blocktune.kernels.flash_kernel import IN_ORDER
from blocktune.kernels.limits import ComputeLimits
from blocktune.kernels.shape import AttentionShape
from blocktune.tuner.on_chip import OnChip, on_chip

Budget = Callable[[KernelConfig, AttentionShape, ComputeLimits], OnChip]


def budget_of(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip | None:
    """What a block of the config keeps on the chip; None for kernels whose tiles nobody has listed."""
    budget = BUDGETS.get(config.kernel)
    return None if budget is None else budget(config, shape, limits)


def _as_plain(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
    """The tiles are those of the plain kernel; one without a parameter `schedule` computes in order."""
    schedule = config.parameters.get("schedule", IN_ORDER)
    return on_chip(replace(config, kernel=FlashForward.name, extra=(("schedule", schedule),)), shape, limits)


BUDGETS: Mapping[str, Budget] = {
    "flash_fwd": on_chip,
    "flash_fwd_tma": on_chip,
    "flash_fwd_general": _as_plain,
    "flash_fwd_sparse": _as_plain,
    "flash_fwd_transposed": _as_plain,
}
"""By kernel name."""

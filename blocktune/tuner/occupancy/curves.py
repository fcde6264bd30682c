"""Curves of the blocks that fit a multiprocessor over each resource, the others being as they are.

curves = curves_of(occupancy(resources, limits))
curves["registers"].steps        # ((8, 16), (72, 14), ...): from 8 registers on 16 blocks, from 72 on 14
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from blocktune.kernels.hardware.limits import (
    KIB,
    MAX_REGISTERS_PER_THREAD,
    MAX_THREADS_PER_BLOCK,
    REGISTER_UNIT,
    WARP_SIZE,
)
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.tuner.occupancy.calculator import Occupancy, occupancy

REGISTER_STEP = REGISTER_UNIT // WARP_SIZE
"""Registers of a thread are handed out in multiples of it."""

TITLES = {
    "registers": "registers per thread",
    "shared_bytes": "dynamic shared memory of a block, KiB",
    "num_warps": "warps of a block",
}
"""The resources that curves are over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Blocks over one resource, as steps down.

    steps: pairs of a value and the blocks from it on to the next pair, in units of the title.
    last: the largest value.
    here: the kernel's own value and its blocks.
    """

    title: str
    steps: tuple[tuple[float, int], ...]
    last: float
    here: tuple[float, int]

    def blocks_at(self, value: float) -> int:
        """Return the blocks at a value between the first and the last one."""
        return next(blocks for start, blocks in reversed(self.steps) if start <= value)

    def to_json(self) -> dict[str, Any]:
        return {"title": self.title, "steps": [list(step) for step in self.steps], "last": self.last}


def curves_of(result: Occupancy) -> dict[str, Curve]:
    """Return a curve for every resource of `TITLES`, for this answer's kernel and device.

    Values are tried where another unit of the resource begins to be handed out, so that no step is missed.
    """
    limits, static = result.limits, result.resources.static_shared_bytes
    last = limits.shared_per_block_optin_bytes - static
    first = (1 - static - limits.shared_reserved_bytes) % limits.shared_unit_bytes
    values = {
        "registers": (*range(1, MAX_REGISTERS_PER_THREAD, REGISTER_STEP), MAX_REGISTERS_PER_THREAD),
        "shared_bytes": (0, *range(first, last, limits.shared_unit_bytes), last),
        "num_warps": range(1, MAX_THREADS_PER_BLOCK // WARP_SIZE + 1),
    }
    return {name: _curve(result, name, values[name]) for name in TITLES}


def _curve(result: Occupancy, name: str, values: Iterable[int]) -> Curve:
    unit = KIB if name == "shared_bytes" else 1
    own = getattr(result.resources, name)
    steps: list[tuple[float, int]] = []
    ordered = sorted({*values, own})
    for value in ordered:
        blocks = _blocks(result, replace(result.resources, **{name: value}))
        if not steps or blocks != steps[-1][1]:
            steps.append((value / unit, blocks))
    return Curve(
        title=TITLES[name], steps=tuple(steps), last=ordered[-1] / unit, here=(own / unit, result.blocks_per_sm)
    )


def _blocks(result: Occupancy, resources: KernelResources) -> int:
    return occupancy(resources, result.limits, carveout_percent=result.carveout_percent).blocks_per_sm

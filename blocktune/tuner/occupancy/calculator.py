"""How many blocks of a compiled kernel fit on one multiprocessor (SM), what limits them, and what would lift the limit.

    resources = KernelResources(registers=168, shared_bytes=115_712, num_warps=4, tensor_cores="wgmma")
    result = occupancy(resources, limits_for((9, 0)))   # result.blocks_per_sm == 2
    requirement(3, resources.num_warps, result.limits)  # at most 168 registers and 76,800 B

`blocktune.tuner.occupancy.text.explain(result)` says it in words. The model is NVIDIA's own, limit for limit and tie
for tie: `tests/tuner/occupancy/test_occupancy_differential.py` compares it with `cuda_occupancy.h`. What that model
lacks is kept apart: `tensor_memory_blocks` here, `Waves` in waves.py, spills in `KernelResources`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from blocktune.kernels.hardware.limits import (
    KIB,
    MAX_REGISTERS_PER_THREAD,
    MAX_THREADS_PER_BLOCK,
    REGISTER_UNIT,
    WARP_SIZE,
    ComputeLimits,
)
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.bindings import bound_value
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.text import html_table

# The launch check lets 256 registers pass, one more than the compiler ever emits.
_LAUNCHABLE_REGISTERS = MAX_REGISTERS_PER_THREAD + 1


class Limiter(StrEnum):
    """A resource that can bound the number of resident blocks."""

    WARPS = "warps"
    BLOCKS = "blocks"
    REGISTERS = "registers"
    SHARED_MEMORY = "shared_memory"
    BARRIERS = "barriers"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Occupancy:
    """The answer for one kernel on one SM.

    limit_blocks: blocks that each limit alone would allow, None where it does not apply. blocks_per_sm: the smallest of
    them; 0 means that a launch fails. fraction: active warps over the most that the SM holds, 0 to 1.
    block_shared_bytes: what a block takes, reserve and rounding included. shared_capacity_bytes: what the SM offers at
    this carve-out.
    """

    resources: KernelResources
    limits: ComputeLimits
    limit_blocks: Mapping[Limiter, int | None] = field(hash=False)
    block_shared_bytes: int
    shared_capacity_bytes: int
    carveout_percent: int | None

    @property
    def blocks_per_sm(self) -> int:
        return min(limit for limit in self.limit_blocks.values() if limit is not None)

    @property
    def binding(self) -> tuple[Limiter, ...]:
        """Every limit that equals `blocks_per_sm`, ties included: all of them must be lifted to gain a block."""
        return tuple(name for name, limit in self.limit_blocks.items() if limit == self.blocks_per_sm)

    @property
    def limiters(self) -> tuple[Limiter, ...]:
        """The limiters that NVIDIA's calculator reports. They are the binding ones, except where barriers alone bind:
        it applies barriers last and keeps what bound before them on its list."""
        others = {name: limit for name, limit in self.limit_blocks.items() if name != Limiter.BARRIERS}
        lowest = min(limit for limit in others.values() if limit is not None)
        bound_before = {name for name, limit in others.items() if limit == lowest}
        return tuple(name for name in self.limit_blocks if name in self.binding or name in bound_before)

    @property
    def active_warps(self) -> int:
        return self.blocks_per_sm * self.resources.num_warps

    @property
    def fraction(self) -> float:
        return self.active_warps / self.limits.max_warps_per_sm

    @property
    def smallest_carveout_kib(self) -> int:
        """The smallest shared-memory size that keeps these blocks; the rest is L1 cache."""
        needed = max(1, self.blocks_per_sm) * self.block_shared_bytes
        whole = self.limits.shared_per_sm_bytes // KIB
        return min((kib for kib in self.limits.carveouts_kib if kib * KIB >= needed), default=whole)

    def __str__(self) -> str:
        return str(bound_value("text_of_occupancy")(self))

    def __repr__(self) -> str:
        """Return the occupancy in words, as `print` shows it."""
        return str(self)

    def _repr_html_(self) -> str:
        """Return a table for a notebook, the blocks that each limit allows with what binds in bold, and its curves."""
        title = (
            f"{self.blocks_per_sm} blocks/SM on compute capability {self.limits.name}: {self.active_warps} of "
            f"{self.limits.max_warps_per_sm} warps"
        )
        rows = {str(name).replace("_", " "): limit for name, limit in self.limit_blocks.items() if limit is not None}
        binding = {str(name).replace("_", " ") for name in self.binding}
        table = html_table(title, {name: str(limit) for name, limit in rows.items()}, bold=binding)
        return f"<div>{table}{bound_value('pictures_of')(self)}</div>"

    def to_json(self) -> dict[str, Any]:
        warps = self.resources.num_warps
        last = min(self.limits.max_blocks_per_sm, max(8, self.blocks_per_sm + 1))
        return {
            "cc": self.limits.name,
            "resources": self.resources.to_json(),
            "blocks_per_sm": self.blocks_per_sm,
            "active_warps": self.active_warps,
            "max_warps": self.limits.max_warps_per_sm,
            "occupancy": self.fraction,
            "limits": {str(name): limit for name, limit in self.limit_blocks.items()},
            "limiters": [str(name) for name in self.limiters],
            "block_shared_bytes": self.block_shared_bytes,
            "reserved_shared_bytes": self.limits.shared_reserved_bytes,
            "shared_capacity_bytes": self.shared_capacity_bytes,
            "carveout_percent": self.carveout_percent,
            "smallest_carveout_kib": self.smallest_carveout_kib,
            "requirements": [
                requirement(blocks, warps, self.limits, carveout_percent=self.carveout_percent).to_json()
                for blocks in range(1, last + 1)
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """The most that a block may use if `blocks` of them are to be resident; None where no amount is small enough.

    registers: registers per thread, at the block's number of warps.
    shared_bytes: static and dynamic together, without the reserve.
    """

    blocks: int
    registers: int | None
    shared_bytes: int | None
    num_warps: int | None
    barriers: int | None

    def to_json(self) -> dict[str, Any]:
        return {
            "blocks": self.blocks,
            "registers": self.registers,
            "shared_bytes": self.shared_bytes,
            "num_warps": self.num_warps,
        }


def occupancy(resources: KernelResources, limits: ComputeLimits, *, carveout_percent: int | None = None) -> Occupancy:
    """Return the blocks of this kernel that one SM holds at once.

    Args:
        resources: of one compiled kernel; its `shared_bytes` is what the launch asks for.
        limits: of the device.
        carveout_percent: the preferred share of shared memory, 0 to 100; None leaves the SM its maximum.

    Raises:
        UsageError: a resource is negative, there is no warp, or the percentage is out of range.
    """
    _check(resources, carveout_percent)
    block_shared = _block_shared_bytes(resources, limits)
    capacity = _capacity_bytes(block_shared, limits, carveout_percent)
    threads_fit = resources.threads <= MAX_THREADS_PER_BLOCK
    return Occupancy(
        resources=resources,
        limits=limits,
        limit_blocks={
            Limiter.WARPS: limits.max_warps_per_sm // resources.num_warps if threads_fit else 0,
            Limiter.BLOCKS: limits.max_blocks_per_sm,
            Limiter.REGISTERS: _register_limit(resources, limits),
            Limiter.SHARED_MEMORY: _shared_limit(block_shared, capacity, limits),
            Limiter.BARRIERS: _barrier_limit(resources, limits),
        },
        block_shared_bytes=block_shared,
        shared_capacity_bytes=capacity,
        carveout_percent=carveout_percent,
    )


def shared_bytes_for(blocks: int, limits: ComputeLimits, *, carveout_percent: int | None = None) -> int | None:
    """Return the most shared memory, static and dynamic together, with which `blocks` blocks are resident.

    Args:
        blocks: at least 1.
        limits: of the device.
        carveout_percent: as for `occupancy`. One block gets a larger carve-out where it needs one, several do not.

    Returns:
        Bytes per block without the reserve; None if even an empty block is too large.
    """
    _check_blocks(blocks)
    percent = None if blocks == 1 else carveout_percent
    capacity = _capacity_bytes(1, limits, percent)
    unit = limits.shared_unit_bytes
    bytes_each = capacity // blocks // unit * unit - limits.shared_reserved_bytes
    return min(bytes_each, limits.shared_per_block_optin_bytes) if bytes_each >= 0 else None


def registers_for(blocks: int, num_warps: int, limits: ComputeLimits) -> int | None:
    """Return the most registers per thread with which `blocks` blocks of `num_warps` warps are resident.

    Returns:
        A multiple of 8 or 255; None if no number is small enough.
    """
    _check_blocks(blocks)
    warps_each = -(-blocks * num_warps // limits.sub_partitions)
    by_sm = limits.registers_per_sm // limits.sub_partitions // warps_each
    by_launch = limits.registers_per_block // _round_up(num_warps, limits.sub_partitions)
    registers = min(by_sm, by_launch) // REGISTER_UNIT * REGISTER_UNIT // WARP_SIZE
    return min(registers, MAX_REGISTERS_PER_THREAD) or None


def requirement(
    blocks: int, num_warps: int, limits: ComputeLimits, *, carveout_percent: int | None = None
) -> Requirement:
    """Return what every resource may be at most for `blocks` resident blocks of `num_warps` warps."""
    warps = min(limits.max_warps_per_sm // blocks, MAX_THREADS_PER_BLOCK // WARP_SIZE)
    return Requirement(
        blocks=blocks,
        registers=registers_for(blocks, num_warps, limits),
        shared_bytes=shared_bytes_for(blocks, limits, carveout_percent=carveout_percent),
        num_warps=warps or None,
        barriers=None if limits.barriers_per_sm is None else limits.barriers_per_sm // blocks or None,
    )


def tensor_memory_blocks(columns: int, limits: ComputeLimits) -> int | None:
    """Return the blocks whose tensor memory fits an SM together; None where it does not limit. Not in NVIDIA's model:
    there a further block may become resident and wait for its columns."""
    return limits.tensor_memory_columns // columns if columns and limits.tensor_memory_columns else None


def _check(resources: KernelResources, carveout_percent: int | None) -> None:
    for name, least in _LEAST.items():
        value = getattr(resources, name)
        if type(value) is not int or value < least:
            raise UsageError(f"`{name} >= {least}` must hold, but got {name}={value!r}. Give a whole number.")
    if carveout_percent is not None and carveout_percent not in range(101):
        raise UsageError(f"The carve-out must be 0 to 100 percent, but got {carveout_percent!r}.")


_LEAST = {"num_warps": 1, "registers": 0, "shared_bytes": 0, "static_shared_bytes": 0, "barriers": 0}
"""Of each resource of a block."""


def _check_blocks(blocks: int) -> None:
    if blocks < 1:
        raise UsageError(f"The number of resident blocks must be at least 1, but got {blocks}.")


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _block_shared_bytes(resources: KernelResources, limits: ComputeLimits) -> int:
    asked = resources.shared_bytes + resources.static_shared_bytes
    return _round_up(asked + limits.shared_reserved_bytes, limits.shared_unit_bytes)


def _capacity_bytes(block_bytes: int, limits: ComputeLimits, percent: int | None) -> int:
    """Return the carve-out: the preference rounded up to a supported size, which must hold one block."""
    if percent is None:
        return limits.shared_per_sm_bytes
    wanted = max(percent * limits.shared_per_sm_bytes // 100, block_bytes)
    sizes = (kib * KIB for kib in limits.carveouts_kib)
    return min((size for size in sizes if size >= wanted), default=limits.shared_per_sm_bytes)


def _shared_limit(block_bytes: int, capacity_bytes: int, limits: ComputeLimits) -> int | None:
    if block_bytes == 0:
        return None
    fits = block_bytes <= limits.shared_per_block_optin_bytes + limits.shared_reserved_bytes
    return capacity_bytes // block_bytes if fits else 0


def _register_limit(resources: KernelResources, limits: ComputeLimits) -> int | None:
    """Return the blocks that the register file has room for; None where no register is used.

    Registers are handed out per warp, and a warp lives in one sub-partition with its own share of the file.
    """
    if resources.registers == 0:
        return None
    per_warp = _round_up(resources.registers * WARP_SIZE, REGISTER_UNIT)
    per_block = per_warp * _round_up(resources.num_warps, limits.sub_partitions)
    if resources.registers > _LAUNCHABLE_REGISTERS or per_block > limits.registers_per_block:
        return 0
    warps = limits.registers_per_sm // limits.sub_partitions // per_warp * limits.sub_partitions
    return warps // resources.num_warps


def _barrier_limit(resources: KernelResources, limits: ComputeLimits) -> int | None:
    if limits.barriers_per_sm is None or resources.barriers == 0:
        return None
    return limits.barriers_per_sm // resources.barriers

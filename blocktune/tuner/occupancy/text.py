"""An occupancy in words that a person can act on.

    print(explain(occupancy(resources, limits), alternatives={"num_stages 3→2": 98_304}))

The text has what a block needs, what the system reserves and what the SM has; every limit; every binding limit; the
nearest change that lifts them; and apart from these, what NVIDIA's model lacks: spills, tensor memory and waves.
"""

from collections.abc import Mapping

from blocktune.kernels.hardware.limits import KIB, REGISTER_UNIT, WARP_SIZE
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.tuner.occupancy.calculator import (
    Limiter,
    Occupancy,
    Requirement,
    requirement,
    tensor_memory_blocks,
)
from blocktune.tuner.occupancy.waves import Waves

_WORDS = {
    Limiter.WARPS: "warps",
    Limiter.BLOCKS: "blocks",
    Limiter.REGISTERS: "registers",
    Limiter.SHARED_MEMORY: "shared memory",
    Limiter.BARRIERS: "barriers",
}
_NOT_THE_GOAL = (
    "Higher occupancy is not the goal: one or two blocks/SM are normal for pipelined attention, where stages hide the "
    "latency that further warps would hide. Only a measurement decides."
)


def text_of_occupancy(
    result: Occupancy,
    *,
    alternatives: Mapping[str, int] | None = None,
    waves: Waves | None = None,
    tensor_memory_columns: int = 0,
) -> str:
    """Return what limits the blocks on an SM and what would lift it, one statement per line.

    Args:
        result: what `occupancy` returned.
        alternatives: changes that were tried, by name, with the shared bytes of a block that they lead to; those that
            are small enough are named.
        waves: of the grid that will be launched.
        tensor_memory_columns: of a block, as the compiler reports them.
    """
    lines = [_headline(result), _limits_sentence(result), _all_limits(result), _change(result, alternatives or {})]
    lines += (
        _room(result) + _carveout(result) + _spills(result.resources) + _tensor_memory(result, tensor_memory_columns)
    )
    if waves is not None:
        lines.append(_waves(waves))
    if result.fraction < 1:
        lines.append(_NOT_THE_GOAL)
    return "\n".join(lines)


def _headline(result: Occupancy) -> str:
    where = f"compute capability {result.limits.name}"
    if result.blocks_per_sm == 0:
        return f"0 blocks/SM: this kernel cannot be launched on {where}."
    warps = f"{result.active_warps} of {result.limits.max_warps_per_sm} warps"
    return f"{_blocks(result.blocks_per_sm)}/SM on {where}: {warps}, {100 * result.fraction:.4g} % occupancy."


def _limits_sentence(result: Occupancy) -> str:
    names = " and ".join(_WORDS[name] for name in result.binding)
    tie = ", which tie" if len(result.binding) > 1 else ""
    return f"Limited by {names}{tie}: " + "; ".join(_need(name, result) for name in result.binding) + "."


def _need(limiter: Limiter, result: Occupancy) -> str:
    """Return what a block takes of the limiting resource and what the SM has."""
    resources, limits = result.resources, result.limits
    match limiter:
        case Limiter.WARPS:
            has = "a block may have 32" if resources.num_warps > 32 else f"the SM holds {limits.max_warps_per_sm}"
            return f"the block has {_warps(resources.num_warps)}, {has}"
        case Limiter.BLOCKS:
            return f"the SM holds {limits.max_blocks_per_sm} blocks, however small"
        case Limiter.REGISTERS:
            return _register_need(result)
        case Limiter.SHARED_MEMORY:
            return _shared_need(result)
        case Limiter.BARRIERS:
            return f"the block uses {_count(resources.barriers, 'barrier')}, the SM has {limits.barriers_per_sm}"


def _register_need(result: Occupancy) -> str:
    resources, limits = result.resources, result.limits
    per_warp = -(-resources.registers * WARP_SIZE // REGISTER_UNIT) * REGISTER_UNIT
    need = (
        f"{resources.registers} registers/thread are {per_warp:,} a warp, the block has {_warps(resources.num_warps)}"
    )
    if result.limit_blocks[Limiter.REGISTERS] == 0:
        parts = limits.sub_partitions
        counted = -(-resources.num_warps // parts) * parts
        return f"{need}, counted as {counted} over {parts} sub-partitions, and may take {limits.registers_per_block:,}"
    share = limits.registers_per_sm // limits.sub_partitions
    held = share // per_warp * limits.sub_partitions
    return f"{need}; {limits.sub_partitions} sub-partitions of {share:,} hold {_warps(held)}"


def _shared_need(result: Occupancy) -> str:
    resources, limits = result.resources, result.limits
    asked = resources.shared_bytes + resources.static_shared_bytes
    parts = [f"{asked:,} B"]
    if limits.shared_reserved_bytes:
        parts.append(f"{limits.shared_reserved_bytes:,} B reserved")
    rounding = result.block_shared_bytes - asked - limits.shared_reserved_bytes
    if rounding:
        parts.append(f"{rounding} B rounding")
    total = f" = {result.block_shared_bytes:,} B" if len(parts) > 1 else ""
    has = f"the SM has {result.shared_capacity_bytes:,} B"
    if asked > limits.shared_per_block_optin_bytes:
        has = f"a block may ask for {limits.shared_per_block_optin_bytes:,} B"
    return f"the block needs {' + '.join(parts)}{total}, {has}"


def _all_limits(result: Occupancy) -> str:
    """Return every limit in blocks; the binding ones are known already."""
    others = [
        f"{_WORDS[name]} {'unlimited' if limit is None else limit}"
        + (f" ({result.resources.registers}/thread)" if name is Limiter.REGISTERS else "")
        for name, limit in result.limit_blocks.items()
        if name not in result.binding and not (name is Limiter.BARRIERS and limit is None)
    ]
    return f"Other limits, in blocks: {', '.join(others)}."


def _change(result: Occupancy, alternatives: Mapping[str, int]) -> str:
    """Return the nearest change that gains a block."""
    if Limiter.BLOCKS in result.binding:
        return f"Nothing lifts the limit of {result.limits.max_blocks_per_sm} blocks; blocks of more warps fill the SM."
    if result.active_warps == result.limits.max_warps_per_sm:
        return "All warps of the SM are in use; there is nothing to lift."
    target = result.blocks_per_sm + 1
    most = requirement(target, result.resources.num_warps, result.limits, carveout_percent=result.carveout_percent)
    needs = " and ".join(_requirement_text(name, most, result) for name in result.binding)
    return f"For {_blocks(target)} you need {needs}{_fitting(result, most, alternatives)}."


def _requirement_text(limiter: Limiter, most: Requirement, result: Occupancy) -> str:
    resources = result.resources
    if limiter is Limiter.REGISTERS:
        if most.registers is None:
            return f"fewer than {_warps(resources.num_warps)} per block, since no register count is small enough"
        return f"≤ {most.registers} registers/thread (now {resources.registers})"
    if limiter is Limiter.SHARED_MEMORY:
        if most.shared_bytes is None:
            return "more shared memory than the SM has for its reserve alone"
        asked = resources.shared_bytes + resources.static_shared_bytes
        return f"≤ {most.shared_bytes:,} B of shared memory (now {asked:,})"
    if limiter is Limiter.WARPS:
        return f"≤ {_warps(most.num_warps or 0)} per block (now {resources.num_warps})"
    return f"≤ {_count(most.barriers or 0, 'barrier')} (now {resources.barriers})"


def _fitting(result: Occupancy, most: Requirement, alternatives: Mapping[str, int]) -> str:
    """Return the alternatives with little enough shared memory, where that binds."""
    if Limiter.SHARED_MEMORY not in result.binding or not alternatives or most.shared_bytes is None:
        return ""
    static = result.resources.static_shared_bytes
    fitting = [f"{name} gives {size:,} B" for name, size in alternatives.items() if size + static <= most.shared_bytes]
    if fitting:
        return ": " + ", ".join(fitting)
    tried = ", ".join(f"{name} gives {size:,} B" for name, size in alternatives.items())
    return f"; not enough: {tried}"


def _room(result: Occupancy) -> list[str]:
    """Return what this number of blocks and the next ones leave to each block, so that one sees how far a change must
    go."""
    warps, first = result.resources.num_warps, max(1, result.blocks_per_sm)
    last = min(first + 2, result.limits.max_warps_per_sm // warps, result.limits.max_blocks_per_sm)
    rows = (
        requirement(blocks, warps, result.limits, carveout_percent=result.carveout_percent)
        for blocks in range(first, last + 1)
    )
    room = [
        f"{_blocks(row.blocks)} ≤ {row.registers} registers and ≤ {row.shared_bytes:,} B"
        for row in rows
        if row.registers is not None and row.shared_bytes is not None
    ]
    return [f"Room at {_warps(warps)} per block: {'; '.join(room)}."] if room else []


def _carveout(result: Occupancy) -> list[str]:
    if result.carveout_percent is None:
        return []
    return [
        f"The carve-out preference of {result.carveout_percent} % gives {result.shared_capacity_bytes // KIB} KiB of "
        f"shared memory; the SM can be set to {', '.join(map(str, result.limits.carveouts_kib))} KiB."
    ]


def _spills(resources: KernelResources) -> list[str]:
    if not resources.stack_bytes and not resources.spill_bytes:
        return []
    spilling = f", {resources.spill_bytes:,} B of it spilled registers" if resources.spill_bytes else ""
    return [
        f"Also: {resources.registers} registers with a {resources.stack_bytes:,} B stack{spilling}. The stack is in "
        "local memory, so a small register count is no good sign here; smaller blocks or more warps shrink it."
    ]


def _tensor_memory(result: Occupancy, columns: int) -> list[str]:
    blocks = tensor_memory_blocks(columns, result.limits)
    if blocks is None:
        return []
    binds = "; a further block waits for its columns" if blocks < result.blocks_per_sm else ""
    return [
        f"Not in NVIDIA's model: a block takes {columns} of {result.limits.tensor_memory_columns} columns of tensor "
        f"memory, enough for {_blocks(blocks)}/SM{binds}."
    ]


def _waves(waves: Waves) -> str:
    text = f"The grid of {waves.grid_blocks:,} blocks is {waves.count:.2f} waves of {waves.resident_blocks:,}"
    if waves.grid_blocks < waves.resident_blocks:
        return f"{text}: it does not fill the GPU, so this occupancy is not reached."
    return f"{text}: the SMs are {100 * waves.efficiency:.0f} % filled on average."


def _blocks(count: int) -> str:
    return _count(count, "block")


def _warps(count: int) -> str:
    return _count(count, "warp")


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

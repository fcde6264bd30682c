"""Cases of the occupancy calculator, drawn over every compute capability, and what Python answers to them."""

import random
from typing import Any

from blocktune.kernels.hardware.limits import ComputeLimits, known_ccs, limits_for
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.tuner.occupancy.calculator import occupancy, requirement

REGISTERS = (0, 1, 8, 32, 40, 64, 72, 80, 96, 128, 168, 240, 255, 256, 257)
WARPS = (1, 2, 3, 4, 5, 8, 12, 16, 24, 31, 32, 33)

Case = list[Any]
"""Compute capability, registers, dynamic and static shared bytes, warps, barriers, carve-out, and blocks to ask for."""


def cases(count: int, seed: int = 19) -> list[Case]:
    """Return cases, half of which lie at the edges of a limit."""
    draw = random.Random(seed)
    rows = [limits_for(cc) for cc in known_ccs()]
    return [_case(draw, draw.choice(rows)) for _ in range(count)]


def _case(draw: random.Random, limits: ComputeLimits) -> Case:
    at_edge = draw.random() < 0.5
    warps = draw.choice(WARPS) if at_edge else draw.randint(1, 40)
    registers = draw.choice(REGISTERS) if at_edge else draw.randint(0, 260)
    most = limits.shared_per_block_optin_bytes
    edge = limits.shared_per_sm_bytes // draw.randint(1, 33) - limits.shared_reserved_bytes + draw.randint(-130, 130)
    shared = max(0, edge) if at_edge else draw.randint(0, most + 2048)
    percent = draw.choice((None, None, 0, 1, 50, 99, 100, draw.randint(0, 100)))
    static = draw.choice((0, 0, 16, draw.randint(0, 4096)))
    return [
        limits.name,
        registers,
        shared,
        static,
        warps,
        draw.choice((0, 1, 1, 2, 16, 70)),
        percent,
        draw.randint(1, 34),
    ]


def answers(rows: list[Case]) -> list[Case]:
    """Return what Python says of each case: every limit, the block's bytes, the capacity, and a requirement."""
    by_name = {limits.name: limits for limits in map(limits_for, known_ccs())}
    return [_answer(row, by_name[row[0]]) for row in rows]


def _answer(row: Case, limits: ComputeLimits) -> Case:
    _, registers, shared, static, warps, barriers, percent, blocks = row
    resources = KernelResources(
        registers=registers,
        shared_bytes=shared,
        static_shared_bytes=static,
        num_warps=warps,
        barriers=barriers,
        tensor_cores="none",
    )
    found = occupancy(resources, limits, carveout_percent=percent)
    need = requirement(blocks, warps, limits, carveout_percent=percent)
    return [
        *found.limit_blocks.values(),
        found.blocks_per_sm,
        [str(name) for name in found.binding],
        found.block_shared_bytes,
        found.shared_capacity_bytes,
        [need.registers, need.shared_bytes, need.num_warps, need.barriers],
    ]


SCRIPT = """
const answer = ([cc, registers, shared_bytes, static_shared_bytes, num_warps, barriers, percent, blocks]) => {
  const limits = table.limits[cc];
  const kernel = { registers, shared_bytes, static_shared_bytes, num_warps, barriers };
  const found = BT.occupancy(kernel, limits, table.hardware, percent);
  const need = BT.requirement(blocks, num_warps, limits, table.hardware, percent);
  const limited = BT.LIMITERS.map((name) => found.by[name]);
  const most = [need.registers, need.shared_bytes, need.num_warps, need.barriers];
  return [...limited, found.blocks, found.binding, found.blockShared, found.capacity, most];
};
"""
"""What the page's arithmetic says of a case, in the same order; `table` has the limits."""

"""Which schedule should be fastest: a model of bytes and overlap that needs no GPU.

A rank's steps follow each other; while one computes, the keys of the next travel, so that a step takes the longer of
the two. Trading heads for tokens overlaps with nothing. What all ranks wait for is the slowest of them.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import inf

import torch

from blocktune.kernels.files.variables import LOCAL_RANKS
from blocktune.kernels.hardware.device import DeviceSpec, current_device
from blocktune.kernels.values.errors import NoDeviceError
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.parallel.plan.blocks import AttentionBlock
from blocktune.runtime.parallel.plan.schedule import RankProblem, Schedule, columns_of, possible, require_possible
from blocktune.runtime.parallel.plan.steps import RankStep, Transfer, steps_of

EFFICIENCY = 0.73
"""Of the tensor cores, that attention reaches on long sequences."""

LAUNCH_S = 10e-6
"""Of a call of attention, at least."""

ABOUT = 1.01
"""What the model does not tell apart."""

PREFERRED = tuple(Schedule)
"""The fewest keys of other ranks at a time first."""

PREFERRED_BACKWARD = Schedule.ALL_GATHER, Schedule.RING, Schedule.ULYSSES
"""The fewest calls first: on four GPUs the backward over all keys at once took 0.98 of the ring's, and no more memory
with all that a backward keeps (results/h200-x4.parallel.json)."""

SUM_BYTES = 8
"""Of an output element that is added to a sum, of which the first and the last are in 16 bits."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of a rank: attention in FLOP/s, device memory and the link to other ranks in bytes/s, and the time that a
    message takes at least."""

    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    latency_s: float


CPU = Machine(flops_per_s=5e10, memory_bytes_per_s=1e10, link_bytes_per_s=2e9, latency_s=1e-4)
"""An order of magnitude; it decides for tests and small trials only."""

LINK_BYTES_PER_S = {7: 150e9, 8: 300e9, 9: 450e9, 10: 900e9}
"""NVLink in one direction by major compute capability, nominal (NVIDIA's data sheets of V100, A100, H100 and B200)."""

LINK_EFFICIENCY = 0.35
"""Of NVLink's nominal rate, what messages around a ring of four H100 reached (results/h100-x4.parallel.json)."""

NETWORK_BYTES_PER_S = 50e9
"""One 400 Gbit/s adapter for each GPU."""


def machine_of(device: torch.device) -> Machine:
    """Return the rates of a device and of the links between such devices."""
    return _gpu(LOCAL_RANKS.number() or 0) if device.type == "cuda" else CPU


@lru_cache(maxsize=8)
def _gpu(local_ranks: int) -> Machine:
    """Return the rates of the current GPU. local_ranks: ranks of a host, 0 where all ranks are on one."""
    try:
        spec = current_device()
    except NoDeviceError:
        return CPU
    return machine_with(spec, one_host=not 0 < local_ranks < torch.distributed.get_world_size())


def machine_with(spec: DeviceSpec, *, one_host: bool) -> Machine:
    """Return the rates of a GPU, and of the links to others on its host or elsewhere."""
    nominal = LINK_BYTES_PER_S.get(spec.limits.cc[0]) if one_host else None
    link = NETWORK_BYTES_PER_S if nominal is None else nominal * LINK_EFFICIENCY
    tflops, memory_gbs = spec.tensor_tflops or 100.0, spec.memory_gbs or 1000.0
    return Machine(tflops * 1e12 * EFFICIENCY, memory_gbs * 1e9, link, 15e-6)


@lru_cache(maxsize=256)
def fastest(problem: RankProblem, machine: Machine, *, backward: bool = False) -> Schedule:
    """Return the schedule with the least time by the model; of those that are about as fast, the preferred one.

    Raises:
        UsageError: heads cannot be traded on this mesh.
    """
    require_possible(problem, Schedule.RING)
    times = {schedule: time_s(problem, schedule, machine) for schedule in possible(problem)}
    order = PREFERRED_BACKWARD if backward else PREFERRED
    return next(schedule for schedule in order if times.get(schedule, inf) <= ABOUT * min(times.values()))


def time_s(problem: RankProblem, schedule: Schedule, machine: Machine) -> float:
    """Return how long the forward takes by the model, on the slowest rank."""
    columns = columns_of(problem, schedule)
    layout, heads = problem.layout.joined(columns), problem.num_heads // columns
    heads_kv = max(problem.num_heads_kv // columns, 1)
    gathers = schedule is Schedule.ALL_GATHER
    ranks = (steps_of(layout, problem.sight, rank, gathers=gathers) for rank in range(layout.num_ranks))
    slowest = max(_steps_s(steps, problem, heads, heads_kv, machine) for steps in ranks)
    return slowest + _trade_s(problem, columns, heads_kv, machine)


def _steps_s(steps: tuple[RankStep, ...], problem: RankProblem, heads: int, heads_kv: int, machine: Machine) -> float:
    """Return how long the steps of a rank take, the first one's transfers being those of the second."""
    computed = [_compute_s(step, problem, heads, heads_kv, machine, first=not n) for n, step in enumerate(steps)]
    moved = [_transfer_s(step, problem, heads_kv, machine) for step in steps[1:]]
    return sum(map(max, computed, [*moved, 0.0]))


def _compute_s(
    step: RankStep, problem: RankProblem, heads: int, heads_kv: int, machine: Machine, *, first: bool
) -> float:
    """Return how long the blocks of a step take; those after the first are added to what is there."""
    total = 0.0
    for number, block in enumerate(step.blocks):
        flops = sum(_flops(block, sizes, problem, heads, heads_kv) for sizes in block.sizes)
        rows = (block.queries[1] - block.queries[0]) * problem.batch * heads
        added = 0 if first and not number else rows * problem.head_dim_v * SUM_BYTES
        total += LAUNCH_S + flops / machine.flops_per_s + added / machine.memory_bytes_per_s
    return total


def _flops(block: AttentionBlock, sizes: tuple[int, int], problem: RankProblem, heads: int, heads_kv: int) -> int:
    """Return the FLOP of one sequence of a block."""
    return AttentionShape(
        batch=problem.batch,
        num_heads=heads,
        num_heads_kv=heads_kv,
        seqlen_q=sizes[0],
        seqlen_k=sizes[1],
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        causal=block.causal,
        features=Features(window=block.window),
    ).flops


def _transfer_s(step: RankStep, problem: RankProblem, heads_kv: int, machine: Machine) -> float:
    """Return how long the keys and values of a step travel; they go out and come in at once."""
    rows = max(_rows(step.sent), _rows(step.received))
    dims = problem.head_dim + problem.head_dim_v
    bytes_moved = rows * problem.batch * heads_kv * dims * problem.element_bytes
    return machine.latency_s * bool(rows) + bytes_moved / machine.link_bytes_per_s


def _rows(transfers: tuple[Transfer, ...]) -> int:
    """Count the rows that travel one way."""
    return sum(transfer.rows[1] - transfer.rows[0] for transfer in transfers)


def _trade_s(problem: RankProblem, columns: int, heads_kv: int, machine: Machine) -> float:
    """Return how long heads are traded for tokens, and back."""
    if columns == 1:
        return 0.0
    dims, heads = problem.head_dim + problem.head_dim_v, problem.num_heads / columns
    tokens = max(problem.layout.length(rank) for rank in range(problem.layout.num_ranks)) * problem.batch
    moved = tokens * dims * (heads + heads_kv) * (columns - 1) * problem.element_bytes
    return 4 * machine.latency_s + moved / machine.link_bytes_per_s

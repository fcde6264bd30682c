"""Which schedule of attention over several ranks is fastest, measured by all of them and kept like a block size."""

import logging
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blocktune.db.records.records import Best, KernelBest
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import DeviceSpec, current_device
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import BlocktuneError
from blocktune.runtime.autotuned.config import KernelProblem
from blocktune.runtime.parallel import measured_schedule
from blocktune.runtime.parallel.attention import context_parallel_attention
from blocktune.runtime.parallel.plan.schedule import RankProblem, Schedule, possible
from blocktune.runtime.parallel.ranks import Ranks
from blocktune.runtime.parallel.request import request_of
from blocktune.tuner.measure.environment import measuring_environment
from blocktune.tuner.measure.telemetry import GpuMonitor

logger = logging.getLogger("blocktune")

ROUNDS = 5
"""Each schedule runs once in every round, so that a GPU that becomes slower is so for all."""


def tune_schedule(q: Tensor, k: Tensor, v: Tensor, *, group: Any = None, **options: Any) -> dict[str, float]:
    """Measure every schedule of a call of `context_parallel_attention` on all ranks, and let `schedule="auto"` take the
    fastest from now on. With tensors that require gradients the backward is measured too.

    The first rank keeps the winner in its store, by device, sizes, ranks and link; `sync_configs` gives later jobs what
    the first rank's store knows.

    Args:
        q: this rank's queries, as `context_parallel_attention` takes them.
        k: its keys.
        v: its values.
        group: as in `context_parallel_attention`.
        options: its other arguments, without `schedule` and `return_lse`.

    Returns:
        the time of each possible schedule in µs on the slowest rank, the fastest one first.

    Raises:
        NoDeviceError: there is no GPU here.
        UsageError: arguments of a rank do not fit each other, or ranks call differently.
        RankError: another rank ended, or took no part within the group's timeout.
    """
    ranks, device = Ranks.of(group), current_device()
    dispatched = options.pop("dispatcher", None)
    given = options if dispatched is None else options | {"dispatcher": dispatched}
    context_parallel_attention(q, k, v, group=group, **given, schedule=Schedule.RING)  # refuses what does not fit
    problem = request_of(ranks, q, k, v, **options, schedule=Schedule.RING).problem
    times_us = _times_us(problem, ranks, (q, k, v), given | {"group": group})
    winner = min(times_us, key=times_us.__getitem__)
    backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    key = measured_schedule.key_of(problem, measured_schedule.link(ranks.column, q.device.type), backward=backward)
    measured_schedule.take(device, key, winner, times_us[winner])
    if ranks.number == 0:
        _keep(device, key, winner, times_us)
    return {str(schedule): times_us[schedule] for schedule in sorted(times_us, key=times_us.__getitem__)}


def _times_us(
    problem: RankProblem, ranks: Ranks, tensors: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]
) -> dict[Schedule, float]:
    """Return the median time of each schedule on the slowest rank."""
    schedules, device = possible(problem), tensors[0].device
    samples = torch.empty(len(schedules), ROUNDS, dtype=torch.float64, device=device)
    for number in range(-1, ROUNDS):  # a first round compiles
        for row, schedule in enumerate(schedules):
            spent = _seconds(tensors, options | {"schedule": str(schedule)})
            if number >= 0:
                samples[row, number] = spent
    for group in ranks.groups:
        dist.all_reduce(samples, dist.ReduceOp.MAX, group=group)
    medians = samples.median(1).values.tolist()
    return {schedule: median * 1e6 for schedule, median in zip(schedules, medians, strict=True)}


def _seconds(tensors: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]) -> float:
    """Return the time of one call, with its backward where there are gradients."""
    _settle(tensors[0].device)
    begin = time.perf_counter()
    out = context_parallel_attention(*tensors, **options)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    if out.requires_grad and leaves:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    _settle(tensors[0].device)
    return time.perf_counter() - begin


def _settle(device: torch.device) -> None:
    """Wait for what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _keep(device: DeviceSpec, key: Any, winner: Schedule, times_us: dict[Schedule, float]) -> None:
    """Store the winner, next to the ring as the default; a store that is away costs a warning."""
    default_us = times_us[Schedule.RING]
    best: KernelBest = Best(
        device=device,
        environment=measuring_environment(device, GpuMonitor(device.uuid, own_processes=1)),
        shape=KernelProblem(measured_schedule.NAME, key),
        config=measured_schedule.config_of(winner),
        kernel_hash=measured_schedule.source_hash(),
        origin=Origin.MEASURED,
        time_us=times_us[winner],
        default=measured_schedule.config_of(Schedule.RING),
        default_time_us=default_us,
        speedup_over_default=default_us / times_us[winner],
        trials=len(times_us),
    )
    try:
        with ResultStore.open() as store:
            store.set_best(best)
    except BlocktuneError as error:
        logger.warning("The fastest schedule is not kept: %s", error)

"""The schedule that was measured fastest for a call, if this process was given one: by `tune_schedule`, by
`sync_configs` from the store of rank 0, or by a frozen file.

It is kept as what an autotuned kernel wins: problem, config and time, under this name and a hash of this folder. Ranks
never look into stores of their own, which may differ.
"""

import hashlib
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

import torch.distributed as dist

from blocktune.kernels.files.reading import SOURCE_BYTES, read_bytes
from blocktune.kernels.files.variables import LOCAL_RANKS
from blocktune.kernels.hardware.device import DeviceSpec, current_device
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import NoDeviceError
from blocktune.runtime.autotuned import config, frozen
from blocktune.runtime.parallel.agreement import digest
from blocktune.runtime.parallel.plan.schedule import RankProblem, Schedule
from blocktune.runtime.store_reader.tuned_config import TunedConfig

NAME = "blocktune.runtime.parallel.attention:context_parallel_attention"
"""The kernel that winners are stored under."""

PARAMETER = "schedule"


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Return 16 hexadecimal digits that change with the schedules."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(read_bytes(source, SOURCE_BYTES) for source in sources)).hexdigest()[:16]


def link(group: Any, device_type: str) -> str:
    """Return what connects the ranks of a group: the backend, and how many of how many ranks share a host."""
    size = dist.get_world_size(group)
    return f"{device_type} {dist.get_backend(group)} {min(LOCAL_RANKS.number() or size, size)}/{size}"


def key_of(problem: RankProblem, link: str, *, backward: bool) -> config.LaunchProblem:
    """Return what a call is known by: its sizes and masks, the layout, the ranks and what connects them."""
    sight = problem.sight
    return config.LaunchProblem.of(
        {
            "batch": problem.batch,
            "num_heads": problem.num_heads,
            "num_heads_kv": problem.num_heads_kv,
            "head_dim": problem.head_dim,
            "head_dim_v": problem.head_dim_v,
            "element_bytes": problem.element_bytes,
            "seqlen": problem.layout.seqlen,
            "window": ":".join("-1" if side == inf else str(int(side)) for side in (sight.left, sight.right)),
            "sequences": len(sight.bounds) - 1,
            "cu_seqlens": digest(sight.bounds),
            "layout": digest(problem.layout),
            "ranks": problem.layout.num_ranks,
            "columns": problem.num_columns,
            "link": link,
            "backward": backward,
        }
    )


def measured_schedule(problem: RankProblem, link: str, *, backward: bool) -> Schedule | None:
    """Return the schedule that was measured fastest for a call on the current GPU, or None."""
    device = _device()
    winners = [] if device is None else frozen.frozen_winners(NAME, source_hash(), device)
    if not winners:
        return None
    wanted = key_of(problem, link, backward=backward)
    found = next((winner.config.parameters[PARAMETER] for winner in winners if winner.shape == wanted), None)
    return None if found is None else Schedule(str(found))


def take(device: DeviceSpec, key: config.LaunchProblem, schedule: Schedule, time_us: float) -> None:
    """Let calls of this process that are known by a key take a schedule from now on."""
    winner = TunedConfig(shape=key, config=config_of(schedule), origin=Origin.MEASURED, time_us=time_us)
    frozen.add_winner((device.key, NAME, source_hash()), winner)


def config_of(schedule: Schedule) -> config.LaunchConfig:
    """Return a schedule as the config of a kernel."""
    return config.LaunchConfig(NAME, ((PARAMETER, str(schedule)),))


@lru_cache(maxsize=1)
def _device() -> DeviceSpec | None:
    try:
        return current_device()
    except NoDeviceError:
        return None

"""Ranks with stores of their own that synchronise: sync_ranks FOLDER.

Runs every scenario with forked processes, which saves them from importing torch each, and prints one JSON object: what
each rank of each scenario told.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from blocktune.db.records.records import Best, Environment
from blocktune.db.store import ResultStore
from blocktune.kernels import registry
from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import NoDeviceError, UsageError
from blocktune.runtime.api import rank_sync
from blocktune.runtime.autotuned.config import KernelProblem, LaunchConfig, LaunchProblem
from blocktune.runtime.autotuned.frozen import frozen_winners
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.store_reader.sources import SqliteConfigs
from tests.support.fakes.dispatch_fakes import H200, PlainKernel, best, shape_like, store_with
from tests.support.forked_work import forked

SHAPE = shape_like(1024)
KERNEL, SOURCE = "package.module:scale", "0123456789abcdef"
CONFIGS = [KernelConfig("plain", m, n, w, 2) for m, n, w in ((128, 64, 8), (64, 64, 4), (64, 32, 8), (128, 32, 4))]


@dataclass(frozen=True)
class Scenario:
    """prepare: makes one rank different. group: the ranks that synchronise, None is all."""

    ranks: int
    prepare: Callable[[int], None] = lambda rank: None
    group: tuple[int, ...] | None = None
    strict_ranks: tuple[int, ...] = ()


def current_device_is(*devices: DeviceSpec | None) -> Callable[[int], None]:
    """Which device each rank has."""

    def current(rank: int) -> DeviceSpec:
        device = devices[rank]
        if device is None:
            raise NoDeviceError("A GPU is required here.")
        return device

    return lambda rank: setattr(rank_sync, "current_device", lambda: current(rank))


def other_triton(rank: int) -> None:
    if rank == 2:
        rank_sync.triton_version = lambda: "3.9.9"


def other_kernel(rank: int) -> None:
    if rank == 1:
        registry.KERNELS["plain"].__class__.source_hash = property(lambda kernel: "1" * 16)


def nonsense(rank: int) -> None:
    rank_sync.read_rows_within = lambda source, device, signed_by=None: ([object()], [])


H100 = device_named("h100_sxm5")
SMALLER = replace(H200, limits=replace(H200.limits, shared_per_block_optin_bytes=100_000))
SCENARIOS = {
    "two": Scenario(2),
    "four": Scenario(4),
    "subgroup": Scenario(3, group=(1, 2)),
    "other device": Scenario(2, current_device_is(H200, H100)),
    "other limits": Scenario(2, current_device_is(H200, SMALLER)),
    "no GPU on rank 0": Scenario(3, current_device_is(None, H200, H200)),
    "no GPU on rank 1": Scenario(2, current_device_is(H200, None)),
    "nonsense": Scenario(2, nonsense),
    "other triton": Scenario(3, other_triton),
    "other kernel": Scenario(2, other_kernel),
    "other strictness": Scenario(2, strict_ranks=(1,)),
}


def told(scenario: Scenario, rank: int, store: Path) -> dict[str, Any]:
    """What one rank saw: its config before and after, the hash, or the error."""
    dispatcher = Dispatcher(SqliteConfigs(store), strict=rank in scenario.strict_ranks)
    members = None if scenario.group is None else list(scenario.group)
    group = None if members is None else dist.new_group(members)
    answer: dict[str, Any] = {"before": CONFIGS.index(dispatcher.explain(SHAPE, device=H200).config)}
    if members is None or rank in members:
        try:
            answer["hash"] = rank_sync.sync_configs(group, dispatcher=dispatcher)
        except UsageError as error:
            answer["error"] = str(error)
    autotuned = [winner.config.parameters["BLOCK"] for winner in frozen_winners(KERNEL, SOURCE, H200)]
    return answer | {"after": CONFIGS.index(dispatcher.explain(SHAPE, device=H200).config), "autotuned": autotuned}


def store_autotuned_winner(store: Path, rank: int) -> None:
    """Let a rank's store hold a winner of a kernel under `autotune`, one of its own."""
    config = LaunchConfig(KERNEL, (("BLOCK", 128 << rank),))
    environment = Environment(triton="3.6.0", ptxas="12.8.93", torch="2.11.0")
    with ResultStore.open(store) as opened:
        opened.set_best(
            Best(
                device=H200,
                environment=environment,
                shape=KernelProblem(KERNEL, LaunchProblem.of({"n": 1000})),
                config=config,
                kernel_hash=SOURCE,
                origin=Origin.MEASURED,
                time_us=1.0,
                default=config,
            )
        )
    os.environ["BLOCKTUNE_DB"] = str(store)


def be_rank(scenario: Scenario, rank: int, folder: Path) -> None:
    store_autotuned_winner(folder.parent / f"store{rank}.db", rank)
    registry.KERNELS = {"plain": PlainKernel()}
    rank_sync.current_device = lambda: H200
    scenario.prepare(rank)
    meeting, patience = f"file://{folder}/meeting", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=scenario.ranks, timeout=patience)
    answer = told(scenario, rank, folder.parent / f"store{rank}.db")
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    dist.destroy_process_group()


def play(scenario: Scenario, folder: Path) -> list[Any]:
    folder.mkdir()
    children = [forked(partial(be_rank, scenario, rank, folder)) for rank in range(scenario.ranks)]
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(scenario.ranks)]


def main(folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for rank, config in enumerate(CONFIGS):
        store_with(folder / f"store{rank}.db", best(SHAPE, config))
    found = {name: play(scenario, folder / name.replace(" ", "_")) for name, scenario in SCENARIOS.items()}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

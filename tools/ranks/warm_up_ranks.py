"""Ranks that warm up together on fake GPUs: warm_up_ranks FOLDER.

Runs every scenario with forked processes and prints one JSON object: what each rank of each scenario told.
"""

import json
import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

import blocktune
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.errors import RankError
from blocktune.runtime.api import rank_sync
from blocktune.tuner.compile_server.compile_ahead import CompileAhead
from blocktune.tuner.drop_in import decide, tune_call
from blocktune.tuner.drop_in.autotune import autotune
from blocktune.tuner.drop_in.tune_call import DropInMachine
from blocktune.tuner.launches.launch_bench import LaunchTools
from tests.support.fakes.fake_triton import FakeGpu, FakeHookedClock, active
from tests.support.forked_work import forked
from tests.support.libraries.autotuned_kernels import CONFIGS, scale_kernel

H200 = device_named("h200")
SCENARIOS = {"two": 2, "alone": 1, "a failure": 2}


def launched(kernel: Any, gpu: FakeGpu, n: int) -> tuple[int, int]:
    """Launch a kernel; returns its block, and how many launches were timed for that."""
    before = len(gpu.timed)
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](torch.ones(n), n, 2.0)
    return gpu.launches[-1].arguments["BLOCK"], len(gpu.timed) - before


def told(scenario: str, rank: int, gpu: FakeGpu) -> dict[str, Any]:
    """What one rank launched at its warm-up, then, and of a kind that the warm-up did not have; or the error."""
    kernel = autotune(CONFIGS, ["n"])(scale_kernel.fn)
    compiled = torch.compile(lambda: launched(kernel, gpu, 1000))
    answer: dict[str, Any] = {}

    def run() -> None:
        if scenario == "a failure" and rank == 1:
            raise ValueError("out of pages")
        answer["warm-up"] = compiled()

    try:
        blocktune.tune_at_warmup(run)
    except (RankError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return answer | {"then": launched(kernel, gpu, 1000), "new": launched(kernel, gpu, 1008)}


def be_rank(scenario: str, rank: int, folder: Path) -> None:
    """Be a rank with a GPU and a store of its own."""
    os.environ["BLOCKTUNE_DB"] = str(folder / f"store{rank}.db")
    os.environ["XDG_CACHE_HOME"] = str(folder / f"cache{rank}")
    gpu = FakeGpu(lambda launch: float(100 + abs(launch.arguments["BLOCK"] - 256)))
    launches = LaunchTools(lambda l2: FakeHookedClock(gpu), lambda: None)
    tools = DropInMachine(ahead=CompileAhead(workers=1), launches=launches, open_store=lambda _: ResultStore.open())
    tune_call.machine = lambda: tools
    decide.current_device = rank_sync.current_device = lambda: H200
    if scenario != "alone":
        meeting, patience = f"file://{folder}/meeting", timedelta(seconds=100)
        dist.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=SCENARIOS[scenario], timeout=patience
        )
    with active(gpu):
        (folder / f"{rank}.json").write_text(json.dumps(told(scenario, rank, gpu)))
    tools.ahead.close()


def play(scenario: str, ranks: int, folder: Path) -> list[Any]:
    """Return what the ranks of a scenario told."""
    folder.mkdir()
    children = [forked(partial(be_rank, scenario, rank, folder)) for rank in range(ranks)]
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def main(folder: Path) -> None:
    """Play all scenarios."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    found = {name: play(name, ranks, folder / name.replace(" ", "_")) for name, ranks in SCENARIOS.items()}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Ranks of one host that launch an autotuned kernel, each on a GPU of its own: autotuned_ranks FOLDER [RANKS]

Plays every scene with RANKS processes, 4 unless given, and empty caches: all launch and synchronise; one never
launches; one dies while it measures; the store is away. Prints a line of JSON for each scene: what every rank told,
null where it told nothing, and the seconds of the scene. Ranks are forked, which saves them from importing torch each.
Without GPUs they are fake ones.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

from blocktune import sync_configs
from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.api import rank_sync
from blocktune.tuner.drop_in import decide, tune_call
from blocktune.tuner.drop_in.autotune import autotune
from blocktune.tuner.drop_in.tune_call import DropInMachine
from blocktune.tuner.launches.launch_bench import LaunchTools
from blocktune.tuner.measure import lock_file
from tests.support.fakes.fake_triton import FakeHookedClock, active
from tests.support.forked_work import forked
from tests.support.libraries.autotuned_kernels import CONFIGS, scale_kernel
from tools.libraries.autotuned_start import noisy

TUNES, SYNCHRONISES, ABSENT, DIES = "tunes", "synchronises", "absent", "dies"
PATIENCE_S = 60
DEATH_S = 1.0
"""After the first launch begins."""
ELEMENTS = 1 << 24

Told = dict[str, Any]


def scenes(ranks: int) -> dict[str, tuple[str, ...]]:
    """Return what each rank does in each scene."""
    return {
        "all synchronise": (SYNCHRONISES,) * ranks,
        "one is absent": (ABSENT, *(TUNES,) * (ranks - 1)),
        "one dies": (DIES, *(TUNES,) * (ranks - 1)),
        "the store is away": (TUNES,) * ranks,
    }


def launch_kernel(rank: int) -> Told:
    """Launch the kernel on this rank's GPU, and say what was chosen, and whether this rank measured it."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank)
    gpu = None if on_gpu else noisy()
    if gpu is not None:
        tune_call.machine = lambda: DropInMachine(launches=LaunchTools(lambda l2: FakeHookedClock(gpu), lambda: None))
    count = ELEMENTS if on_gpu else 1000
    kernel = autotune(CONFIGS, ["n"], restore_value=["x"])(scale_kernel.fn)
    x = torch.ones(count, device="cuda" if on_gpu else "cpu")
    with nullcontext() if gpu is None else active(gpu):
        kernel[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](x, count, 2.0)
    (choice,) = kernel.kernel.choices.values()
    right = bool((x == 2.0).all()) if on_gpu else True
    return {"tuned": choice.tuned, "config": choice.label, "right": right}


def synchronised(folder: Path, rank: int, ranks: int) -> str:
    """Return the hash of what all ranks dispatch with."""
    if not torch.cuda.is_available():
        rank_sync.current_device = lambda: device_named("h200")
    meeting, patience = f"file://{folder}/meeting", timedelta(seconds=PATIENCE_S)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=patience)
    return sync_configs()


def play(role: str, rank: int, ranks: int, folder: Path) -> None:
    """Do what a rank of a scene does, and write what it has to tell."""
    if role == ABSENT:
        return
    begun = folder / "begun"
    if role == DIES:
        begun.touch()
        threading.Timer(DEATH_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while DIES in folder.name and not begun.exists():
        time.sleep(0.01)
    begin = time.monotonic()
    told = launch_kernel(rank)
    if role == SYNCHRONISES:
        told["synchronised"] = synchronised(folder, rank, ranks)
    told["seconds"] = round(time.monotonic() - begin, 1)
    (folder / f"{rank}.json").write_text(json.dumps(told))


def scene(name: str, roles: tuple[str, ...], folder: Path) -> list[Told | None]:
    """Return what the ranks of a scene told."""
    folder.mkdir()
    store = "/proc/nowhere/store.db" if name == "the store is away" else f"{folder}/store.db"
    os.environ |= {"BLOCKTUNE_DB": store, "TRITON_CACHE_DIR": f"{folder}/triton"}
    lock_file.cache_folder = lambda: folder / "cache"
    if not torch.cuda.is_available():
        decide.current_device = lambda: device_named("h200")
    children = [forked(partial(play, role, rank, len(roles), folder)) for rank, role in enumerate(roles)]
    for child in children:
        os.waitpid(child, 0)
    answers = [folder / f"{rank}.json" for rank in range(len(roles))]
    return [json.loads(answer.read_text()) if answer.exists() else None for answer in answers]


def main(folder: Path, ranks: int) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # CUDA could not be forked
    folder.mkdir(parents=True, exist_ok=True)
    for name, roles in scenes(ranks).items():
        begin = time.monotonic()
        told = scene(name, roles, folder / name.replace(" ", "_"))
        row = {"scene": name, "ranks": told, "seconds": round(time.monotonic() - begin, 1)}
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4)

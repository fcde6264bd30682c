"""Processes that launch an autotuned kernel at once, each on a fake GPU: autotuned_start FOLDER STORE ROLE...

A process that `tunes` prints whether it measured, and what it chose; the times are noise of its own, so that processes
agree only by telling each other. One that `dies` is killed while it measures, before the others begin; one that is
`absent` never launches. They are forked, which saves them from importing torch each. Prints a list in JSON, null for a
process that told nothing.
"""

import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import triton

from blocktune.kernels.hardware.device import device_named
from blocktune.tuner.drop_in import decide, tune_call
from blocktune.tuner.drop_in.autotune import autotune
from blocktune.tuner.drop_in.tune_call import DropInMachine
from blocktune.tuner.launches.launch_bench import LaunchTools
from blocktune.tuner.measure import lock_file
from tests.support.fakes.fake_triton import FakeGpu, FakeHookedClock, Launch, active
from tests.support.forked_work import forked
from tests.support.libraries.autotuned_kernels import CONFIGS, scale_kernel


def launch(gpu: FakeGpu) -> tuple[bool, str]:
    """Return whether this process measured, and what it chose."""
    tune_call.machine = lambda: DropInMachine(launches=LaunchTools(lambda l2: FakeHookedClock(gpu), lambda: None))
    kernel = autotune(CONFIGS, ["n"])(scale_kernel.fn)
    with active(gpu):
        kernel[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](torch.ones(1000), 1000, 2.0)
    (choice,) = kernel.kernel.choices.values()
    return choice.tuned, choice.label


def dying(marker: Path) -> FakeGpu:
    """Return a GPU on which the first launch is the last one of the process, once it has said that it measures."""

    def die(launch: Launch) -> None:
        marker.touch()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    return FakeGpu(effect=die)


def noisy() -> FakeGpu:
    """Return a GPU with times that no other process has."""
    chance = random.Random(os.getpid())
    times = {(config.kwargs["BLOCK"], config.num_warps): chance.uniform(100, 200) for config in CONFIGS}
    return FakeGpu(lambda launch: times[launch.arguments["BLOCK"], launch.num_warps])


def play(role: str, answer: Path, marker: Path) -> None:
    if role == "dies":
        launch(dying(marker))
    elif role == "tunes":
        while not marker.exists():
            time.sleep(0.01)
        answer.write_text(json.dumps(launch(noisy())))


def main(folder: Path, store: str, roles: list[str]) -> None:
    os.environ["BLOCKTUNE_DB"], os.environ["TRITON_CACHE_DIR"] = store, f"{folder}/triton"
    lock_file.cache_folder = lambda: folder / "cache"
    decide.current_device = lambda: device_named("h200")
    marker = folder / "begin"
    if "dies" not in roles:
        marker.touch()
    answers = [folder / f"{number}.json" for number in range(len(roles))]
    children = [forked(partial(play, role, answer, marker)) for role, answer in zip(roles, answers, strict=True)]
    for child in children:
        os.waitpid(child, 0)
    told = [json.loads(answer.read_text()) if answer.exists() else None for answer in answers]
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])

"""Ranks with a GPU each that launch the same autotuned kernel: whether they agree, and whether all of them end.

python -m tests.support.programs.autotune_ranks --out results/h200.libraries.json       one rank for each GPU
python -m tests.support.programs.autotune_ranks --fake                                  on four fake ones, no file

Every scenario starts with empty caches. A rank that has not ended after --seconds is killed, and counts as not ended.
The fake GPUs do not agree on which config is the fastest.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

import blocktune
from blocktune.kernels.api import rank_sync
from blocktune.kernels.hardware.device import current_device, device_named
from blocktune.kernels.tuned.kernel import kernels
from blocktune.tuner.measure.environment import source_commit
from blocktune.tuner.tuned import decide, tune_call
from blocktune.tuner.tuned.measure import Measuring
from blocktune.tuner.tuned.tune_call import Tools
from tests.support.autotuned_kernels import scale_kernel
from tests.support.fake_triton import FakeGpu, FakeTurnClock, Launch, active
from tests.support.forked_work import forked
from tests.support.library_document import read, write
from tests.support.programs import program

SIZE = 1 << 22


@dataclass(frozen=True)
class Rank:
    """One process of a scenario. folder: what its processes share. is_fake: its GPU is."""

    number: int
    count: int
    folder: Path
    is_fake: bool

    def launch(self) -> None:
        """Launch the kernel on this rank's GPU."""
        x = torch.ones(SIZE, device="cpu" if self.is_fake else "cuda")
        scale_kernel[lambda meta: (triton.cdiv(SIZE, meta["BLOCK"]),)](x, SIZE, 2.0)

    def say(self, **more: Any) -> None:
        """Leave what this rank chose, and how many kinds of calls it tuned itself."""
        choices = [choice for kernel in kernels for choice in kernel.choices.values()]
        said = {"choices": [choice.label for choice in choices], "tuned": sum(each.tuned for each in choices)}
        (self.folder / f"{self.number}.json").write_text(json.dumps(said | more))

    def join_group(self) -> None:
        backend = "gloo" if self.is_fake else "nccl"
        meeting, patience = f"file://{self.folder}/meeting", timedelta(seconds=60)
        dist.init_process_group(backend, init_method=meeting, rank=self.number, world_size=self.count, timeout=patience)


def all_launch(rank: Rank) -> None:
    rank.launch()
    rank.say()


def one_comes_late(rank: Rank) -> None:
    """The last rank reaches the kernel only after all have synchronised, and measures nothing."""
    rank.join_group()
    if rank.number != rank.count - 1:
        rank.launch()
    tuned = sum(choice.tuned for kernel in kernels for choice in kernel.choices.values())
    blocktune.sync_configs()
    rank.launch()
    rank.say(tuned=tuned)


def one_never_launches(rank: Rank) -> None:
    if rank.number != rank.count - 1:
        rank.launch()
    rank.say()


def one_dies(rank: Rank) -> None:
    """The first rank dies while it tunes and the others wait for it."""
    begun = rank.folder / "begun"
    if rank.number == 0:

        def die(*_: Any) -> None:
            begun.touch()
            time.sleep(1.0)  # so that the others wait by then
            os.kill(os.getpid(), signal.SIGKILL)

        Measuring.run = die  # type: ignore[method-assign, assignment]
    while rank.number != 0 and not begun.exists():
        time.sleep(0.01)
    rank.launch()
    rank.say()


def no_store(rank: Rank) -> None:
    """Each rank measures for itself, and then takes what rank 0 has found."""
    os.environ["BLOCKTUNE_DB"] = "/dev/null/store.db"
    rank.join_group()
    rank.launch()
    tuned = sum(choice.tuned for kernel in kernels for choice in kernel.choices.values())
    blocktune.sync_configs()
    rank.launch()
    rank.say(tuned=tuned)


SCENARIOS: dict[str, Callable[[Rank], None]] = {
    "all launch at once": all_launch,
    "one rank never launches": one_never_launches,
    "one rank comes late": one_comes_late,
    "the rank that tunes dies": one_dies,
    "the store is away": no_store,
}


@contextlib.contextmanager
def gpu_of(rank: Rank) -> Iterator[None]:
    """Let a rank have its GPU, real or fake."""
    if not rank.is_fake:
        torch.cuda.set_device(rank.number)
        yield
        return
    device = device_named("h200")
    for module in (decide, rank_sync):
        module.current_device = lambda: device  # type: ignore[attr-defined]

    def time_us(launch: Launch) -> float:
        return 100.0 + abs(launch.arguments["BLOCK"] - (128 << rank.number % 3))

    with active(FakeGpu(time_us)) as gpu:
        tools = Tools(make_clock=lambda l2: FakeTurnClock(gpu))
        tune_call.machine = lambda: tools
        yield


def be_rank(scenario: str, rank: Rank) -> None:
    blocktune.install()
    with gpu_of(rank):
        SCENARIOS[scenario](rank)


def play(scenario: str, count: int, is_fake: bool, seconds: float) -> dict[str, Any]:
    """Return how the ranks of a scenario ended."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = [started(scenario, Rank(number, count, folder, is_fake)) for number in range(count)]
        ended = ended_in(children, begun + seconds)
        said = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    choices = {choice for each in said for choice in each["choices"]}
    return {
        "scenario": scenario,
        "ranks": count,
        "ended": ended,
        "tuned_in_all": sum(each["tuned"] for each in said),
        "disagreements": max(0, len(choices) - 1),
        "seconds": time.monotonic() - begun,
        "commit": source_commit(),
    }


def started(scenario: str, rank: Rank) -> int:
    """Begin a rank, with caches that it shares with the others, and return its process. One with a fake GPU is forked,
    which saves its imports; CUDA wants a process of its own."""
    os.environ |= {
        "TRITON_CACHE_DIR": f"{rank.folder}/triton",
        "BLOCKTUNE_DB": f"{rank.folder}/store.db",
        "XDG_CACHE_HOME": f"{rank.folder}/cache",
    }
    if rank.is_fake:
        return forked(partial(be_rank, scenario, rank))
    words = ("--rank", scenario, str(rank.number), str(rank.count), str(rank.folder))
    return os.spawnv(os.P_NOWAIT, sys.executable, [*program("autotune_ranks"), *words])


def ended_in(children: Sequence[int], end: float) -> int:
    """Return how many processes ended well before a time; the others are killed."""
    waiting, well = set(children), 0
    while waiting:
        for child in list(waiting):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                waiting.remove(child)
                well += status == 0
        if time.monotonic() > end:
            for child in waiting:
                os.kill(child, signal.SIGKILL)
            end = float("inf")
        time.sleep(0.01)
    return well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the file of library_bench that takes the rows")
    parser.add_argument("--fake", action="store_true", help="four fake GPUs in the place of those that are here")
    parser.add_argument("--seconds", type=float, default=90.0, help="that a scenario may take")
    parser.add_argument("--rank", nargs=4, metavar=("SCENARIO", "NUMBER", "COUNT", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        scenario, number, count, folder = given.rank
        be_rank(scenario, Rank(int(number), int(count), Path(folder), is_fake=False))
        return
    count = 4 if given.fake else torch.cuda.device_count()
    device = "fake GPU" if given.fake else current_device().name
    rows = []
    for scenario in SCENARIOS:
        rows.append({"device": device, **play(scenario, count, given.fake, given.seconds)})
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
        sys.stdout.flush()
    if given.out:
        write(given.out, read(given.out) | {"ranks": rows})


if __name__ == "__main__":
    main()

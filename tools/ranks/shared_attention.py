"""Ranks that share attention: shared_attention FOLDER ordinary|RANKS.

Forks the ranks of every play, which saves them from importing torch each, and prints one JSON object: how the ranks of
each play ended and what they found. Plays that wait for a timeout run while others do.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.support.ranks.cases import cases, errors, many_cases
from tests.support.ranks.plays import ENDINGS, PLAYS

PATIENCE, IN_VAIN = timedelta(seconds=200), timedelta(seconds=15)
"""How long ranks wait for each other, and in plays where one does not come."""

Act = Callable[[], dict[str, Any]]


def groups() -> dict[tuple[int, int], Any]:
    """Return the groups of the first ranks by size and columns, and meshes of all ranks."""
    size = dist.get_world_size()
    found: dict[tuple[int, int], Any] = {(ranks, 1): dist.new_group(list(range(ranks))) for ranks in range(2, size + 1)}
    for columns in (2, 4):
        if size % columns == 0 and size > columns:
            found[size, columns] = DeviceMesh("cpu", torch.arange(size).view(-1, columns))
    return found


def compare(sizes: tuple[int, ...], make: Callable[[int], Any]) -> dict[str, Any]:
    """Return the errors of this rank in every call that it takes part in."""
    known = groups()
    return {
        str(case): errors(case, known[case.ranks, case.columns])
        for size in sizes
        for case in make(size)
        if dist.get_rank() < case.ranks
    }


ORDINARY: dict[str, tuple[int, Act]] = {"compare": (4, lambda: compare((2, 3, 4), cases)), **PLAYS}


def be_rank(act: Act, rank: int, size: int, folder: Path, patience: timedelta) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=patience)
    (folder / f"{rank}.json").write_text(json.dumps(act()))


def fork_rank(act: Act, rank: int, size: int, folder: Path, patience: timedelta) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            be_rank(act, rank, size, folder, patience)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def begin_play(name: str, play: tuple[int, Act], folder: Path, patience: timedelta = PATIENCE) -> Callable[[], Any]:
    """Start the ranks of a play; the function that comes back waits for them and returns what each told."""
    size, act = play
    place = folder / name
    place.mkdir()
    children = [fork_rank(act, rank, size, place, patience) for rank in range(size)]

    def told() -> Any:
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        files = [place / f"{rank}.json" for rank in range(size)]
        return {"statuses": statuses, "told": [json.loads(one.read_text()) if one.exists() else None for one in files]}

    return told


def main(folder: Path, which: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if which == "ordinary":
        plays, in_vain = ORDINARY, ENDINGS
    else:
        plays, in_vain = {"compare": (int(which), lambda: compare((int(which),), many_cases))}, {}
    endings = {name: begin_play(name, play, folder, IN_VAIN) for name, play in in_vain.items()}
    found = {name: begin_play(name, play, folder)() for name, play in plays.items()}
    found |= {name: told() for name, told in endings.items()}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

"""Many processes that do the same at the same moment.

    herd.py create MEMBERS PLACE...                 all open one place after the other, none of which exists
    herd.py write  MEMBERS PLACE DOCUMENT COUNT [PATIENCE]
                                                    each records COUNT trials of its own, and waits PATIENCE seconds

The members are forked from one process that has imported everything and opened nothing, so that hundreds are cheap.
They end with it, however it ends. Prints one line for each that failed.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import alembic.command
import alembic.config  # noqa: F401, which the first to open a place needs
import sqlalchemy.dialects.sqlite  # noqa: F401

from blocktune.db.exchange.importing import records_from
from blocktune.db.store import ResultStore
from blocktune.db.tables.schema import CURRENT
from blocktune.db.tables.sqlite_file import LOCK_TIMEOUT_SECONDS

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent ends."""


def together(members: int, work: Callable[[int], None]) -> None:
    """Runs `work` with the number of the member in forked processes that wait until all are there."""
    gate, opener = os.pipe()
    children = [_member(number, gate, opener, work) for number in range(members)]
    os.close(opener)  # every member's read ends now
    os.close(gate)
    failed = [child for child in children if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0]
    assert not failed, f"{len(failed)} of {members} failed"


def _member(number: int, gate: int, opener: int, work: Callable[[int], None]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(opener)
        os.read(gate, 1)
        work(number)
        status = 0
    except BaseException:
        print(f"member {number}: {traceback.format_exc()}".replace("\n", " | "), flush=True)
    finally:
        os._exit(status)


def create(members: str, *places: str) -> None:
    def open_one(number: int) -> None:
        with ResultStore.open(place) as store:
            assert store.bests() == []

    for place in places:
        together(int(members), open_one)
        with ResultStore.open(place, read_only=True) as store:
            health = store.health()
            assert (health.schema_version, health.sound) == (CURRENT, True)


def write(
    members: str, place: str, document: str, count: str, patience_seconds: str = f"{LOCK_TIMEOUT_SECONDS}"
) -> None:
    _, trials = records_from(json.loads(Path(document).read_text()))

    def record(member: int) -> None:
        with ResultStore.open(place, lock_timeout_seconds=float(patience_seconds)) as store:
            for number in range(int(count)):
                own = (("number", number), ("writer", member))
                store.record(replace(trials[0], config=replace(trials[0].config, extra=own)))

    together(int(members), record)


if __name__ == "__main__":
    {"create": create, "write": write}[sys.argv[1]](*sys.argv[2:])

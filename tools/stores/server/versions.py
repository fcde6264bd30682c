"""Two versions use one store: clients of an older schema write and read while today's upgrade it and write, and die.

The older version is a checkout of the last commit of its schema, so this needs the history of the repository.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from blocktune.db.exchange.document import document_from, save_document
from blocktune.db.records.records import Trial
from blocktune.db.store import ResultStore
from blocktune.db.tables.schema import CURRENT
from tests.support.stores.postgres_server import running_server
from tests.support.stores.sample_records import sample_trials, winner
from tools import ROOT
from tools.stores import Unavailable
from tools.stores.server.old_client import client_lines, fork_work, write_trials

OLD_COMMIT = "9ff243b4e87a8e297bfbbe3d41a37dad6ef867b6"
"""The last one of schema 7."""
KILLED, TODAYS = 2, 10
"""Clients of today that are killed while they upgrade or write, and the number of the first: others are older."""
ENDINGS = {"SchemaTooNewError", "StoreLockedError", "StoreError"}
"""How clients of the older version may end. They do not begin again after a deadlock."""

Pair = tuple[int, int]
"""A writer and the number of its trial."""


@dataclass(frozen=True, slots=True)
class Round:
    """acknowledged, lost: counts of trials. endings: errors of clients. wrong: what should not be."""

    acknowledged: int
    lost: int
    endings: Counter[str]
    wrong: list[str]


@contextmanager
def old_clients(folder: Path, document: Path) -> Iterator["subprocess.Popen[str]"]:
    """Yield a process that runs clients of the older version, as old_client.py says.

    Raises:
        Unavailable: the repository's history does not hold it.
    """
    tree = folder / "old"
    tree.mkdir()
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", OLD_COMMIT], capture_output=True)
    if archive.returncode:
        raise Unavailable(f"no commit {OLD_COMMIT[:10]} in the history")
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    program = Path(__file__).with_name("old_client.py")
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(tree)!r}); runpy.run_path({str(program)!r}, run_name='__main__')"
    )
    command = [sys.executable, "-P", "-c", code, str(document)]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def round_of(place: str, old: "subprocess.Popen[str]", dice: random.Random) -> Round:
    """Return what became of a store that clients of both versions use at once."""
    assert _asked(old, place) == "made"
    time.sleep(dice.uniform(0.2, 1.0))
    said = [_killed_client_lines(place, TODAYS + number, dice) for number in range(KILLED)]
    last = (TODAYS + KILLED, 0)
    with ResultStore.open(place) as store:
        store.record(_numbered(last))
        of_old = json.loads(_answer(old))
        parameters = [trial.config.parameters for trial in store.trials()]
        health = store.health()
    stored = Counter((each["writer"], each["number"]) for each in parameters if "writer" in each)
    acknowledged = {last} | {tuple(each) for each in chain(*of_old["writers"], *said) if isinstance(each, list)}
    endings = [each for each in chain(*of_old["writers"], *of_old["readers"], *said) if isinstance(each, str)]
    wrong = [each for each in endings if each not in ENDINGS]
    wrong += ["a trial is stored twice"] * (max(stored.values()) > 1)
    wrong += ["a reader saw trials vanish"] * any(_shrinks(each) for each in of_old["readers"])
    wrong += [f"the store is {health}"] * ((health.schema_version, health.sound) != (CURRENT, True))
    return Round(len(acknowledged), len(acknowledged - set(stored)), Counter(endings), wrong)


def _killed_client_lines(place: str, number: int, dice: random.Random) -> list[Any]:
    """Return what a client of today said before it was killed."""
    process, said = fork_work(partial(write_trials, place, sample_trials(1)[0], number))
    time.sleep(dice.uniform(0.0, 0.8))
    os.kill(process, signal.SIGKILL)
    return client_lines((process, said))


def _numbered(pair: Pair) -> Trial:
    (trial,) = sample_trials(1)
    writer, number = pair
    return replace(trial, config=replace(trial.config, extra=(("number", number), ("writer", writer))))


def _shrinks(said: list[Any]) -> bool:
    counts = [each for each in said if isinstance(each, int)]
    return counts != sorted(counts)


def _asked(old: "subprocess.Popen[str]", place: str) -> str:
    assert old.stdin is not None
    old.stdin.write(f"{place}\n")
    old.stdin.flush()
    return _answer(old)


def _answer(old: "subprocess.Popen[str]") -> str:
    assert old.stdout is not None
    return old.stdout.readline().strip()


def versions(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """Clients of an older schema use a PostgreSQL store while today's upgrade it, write to it, and are killed."""
    dice, document = random.Random(seed), folder / "trial.json"
    (trial,) = sample_trials(1)
    save_document(document_from(trial.device, [winner()], [trial]), document)
    with running_server() as server, old_clients(folder, document) as old:
        rounds = [round_of(server.create_database(f"versions_{number}"), old, dice) for number in range(tried)]
    wrong = [each for one in rounds for each in one.wrong]
    endings = sum((one.endings for one in rounds), Counter[str]())
    told = ", ".join(f"{count:,} with {how}" for how, count in sorted(endings.items()))
    note = f"{sum(one.acknowledged for one in rounds):,} measurements were acknowledged; clients ended: {told}"
    return sum(one.lost for one in rounds), len(wrong), note + "".join(f"; {each}" for each in wrong[:5])

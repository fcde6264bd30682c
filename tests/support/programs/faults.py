"""The store under fire, with counts: python -m tests.support.programs.faults --out results/store.faults.json

Every case says how often it was tried and what went wrong: rows lost that had been acknowledged, losses that a recovery
understated, wrong rows that were believed, and commands that did not end as they should. A case that this machine
cannot try, for want of a PostgreSQL server or a C compiler, is left out.
"""

import argparse
import json
import platform
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blocktune.db.exchange.document import save_text
from blocktune.db.exchange.merging import Results
from blocktune.db.recorder import fold_left
from blocktune.db.recovery.drill import drill
from blocktune.db.store import ResultStore
from blocktune.kernels.stored.store_file import SqliteRows
from blocktune.kernels.values.errors import BlocktuneError
from tests.support.postgres_server import missing_part
from tests.support.programs import io_faults, program
from tests.support.programs.changed_exports import imports
from tests.support.programs.server_stops import server_stops
from tests.support.sample_records import sample_trials, winner

FORMAT, SCHEMA = "blocktune-faults", 1


@dataclass(frozen=True, slots=True)
class Case:
    """lost: acknowledged rows that are gone without a word, or beyond what a recovery said. wrong: rows that were never
    stored, and commands that ended as none should. note: what else is to be said."""

    name: str
    tried: int
    lost: int
    wrong: int
    seconds: float
    note: str = ""


def cold_starts(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """16 processes create one store at once, again and again."""
    places = [str(folder / f"cold{number}.db") for number in range(tried // 16)]
    found = subprocess.run([*program("herd"), "create", "16", *places], capture_output=True, text=True)
    return 0, int(found.returncode != 0), found.stderr[-200:]


def killed_searches(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """A search is killed at random moments until it has ended."""
    found = subprocess.run(
        [*program("killed_runs"), str(folder), str(tried), str(seed)], capture_output=True, text=True
    )
    if found.returncode:
        return 1, 0, found.stderr[-200:]
    return 0, 0, f"{len(json.loads(found.stdout)['winners'])} searches came to their end"


LOCKED_SEARCH = """
import sys
from dataclasses import replace
from blocktune.db.recorder import Recorder
from blocktune.db.store import ResultStore
store = ResultStore.open(sys.argv[1], lock_timeout_seconds=0.2)
trial = store.trials()[0]
with Recorder(store) as recorder:
    for number in range(int(sys.argv[2]), 10**9):
        recorder.record(replace(trial, config=replace(trial.config, extra=(("n", number),))))
        print(number, flush=True)
"""


def killed_while_locked(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """A search whose store is locked measures, and is killed: what it acknowledged is in its spool."""
    place, dice, lost, acknowledged = folder / "locked.db", random.Random(seed), 0, 0
    with ResultStore.open(place) as store:
        store.record(sample_trials(1)[0])
    for number in range(tried):
        first = 1000 * (number + 1)
        with locked(place):
            command = [sys.executable, "-c", LOCKED_SEARCH, str(place), str(first)]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert child.stdout is not None
            said = [int(child.stdout.readline()) for _ in range(dice.randrange(1, 30))]
            child.send_signal(signal.SIGKILL)
            said += [int(line) for line in child.stdout if line.endswith("\n")]
            child.wait()
            child.stdout.close()
        with ResultStore.open(place) as store:
            fold_left(store)
            stored = {dict(trial.config.extra).get("n") for trial in store.trials()}
        lost += len(set(said) - stored)
        acknowledged += len(said)
    return lost, 0, f"{acknowledged} measurements were acknowledged"


def failing_disks(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """A write, sync, truncation or read of the store's files fails, once or from then on."""
    try:
        told = io_faults.run(folder, tried, seed)
    except FileNotFoundError as error:
        raise Unavailable("no C compiler") from error
    lost = sum("lost" in each for each in told["wrong"])
    ended = ", ".join(f"{count} {how}" for how, count in sorted(told["ended"].items()))
    return lost, len(told["wrong"]) - lost, f"ended: {ended}{''.join(f'; {each}' for each in told['wrong'][:5])}"


def damages(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """Copies of a store are damaged and recovered: `tune doctor --drill`."""
    place = folder / "drill.db"
    with ResultStore.open(place) as store:
        store.merge([Results(bests=(winner(),), trials=tuple(sample_trials(200)))], trust=True)
    counts = drill(place, ways=tried, seed=seed)
    note = (
        f"{counts.lost / counts.copies:.1f} of {counts.rows} rows of a copy were lost on average and said to be; "
        f"{counts.refused} copies were refused"
    )
    return counts.understated, counts.wrong, note


def flipped_bits(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """Production reads a store with one flipped bit: no row may be another one's."""
    place, dice, wrong, refused = folder / "bits.db", random.Random(seed), 0, 0
    with ResultStore.open(place) as store:
        store.set_best(winner())
    with closing(sqlite3.connect(place)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content, device = place.read_bytes(), winner().device
    sound = {json.dumps(row, sort_keys=True) for row in SqliteRows(place).read(device)}
    copy = folder / "bit.db"
    for _ in range(tried):
        damaged = bytearray(content)
        damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        copy.write_bytes(damaged)
        try:
            rows = {json.dumps(row, sort_keys=True) for row in SqliteRows(copy).read(device)}
        except BlocktuneError:
            refused += 1
            continue
        wrong += len(rows - sound)
    return 0, wrong, f"{refused} files were refused"


def commands(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """Random commands with random words on sound, damaged and hostile files."""
    found = subprocess.run([*program("cli_fuzz"), str(folder), str(tried), str(seed)], capture_output=True, text=True)
    if found.returncode:
        return 0, tried, found.stderr[-300:]
    told = json.loads(found.stdout)
    ended = ", ".join(f"{count} with {code}" for code, count in sorted(told["ended"].items()))
    broken = "".join(f"; {each['words']}: {each['rule']}" for each in told["broken"][:5])
    note = f"ended: {ended}; {told['interrupted']} got Ctrl-C{broken}"
    return 0, len(told["broken"]), note


@contextmanager
def locked(place: Path) -> Iterator[None]:
    with closing(sqlite3.connect(place, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


class Unavailable(Exception):
    """A case that this machine cannot try."""


def stops(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """A PostgreSQL server is killed and started again while processes write to it."""
    if missing_part():
        raise Unavailable(missing_part())
    return server_stops(folder, tried, seed)


CASES: dict[str, tuple[Callable[[Path, int, int], tuple[int, int, str]], int]] = {
    "cold starts": (cold_starts, 480),
    "killed searches": (killed_searches, 500),
    "killed searches of a locked store": (killed_while_locked, 20),
    "failing disks": (failing_disks, 2000),
    "PostgreSQL stops": (stops, 60),
    "damaged files, recovered": (damages, 1000),
    "changed exports, imported": (imports, 10_000),
    "flipped bits, read by production": (flipped_bits, 5000),
    "commands": (commands, 5000),
}
"""What is tried, and how often."""


def tried(name: str, count: int, seed: int) -> Case:
    """One case, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        started = time.monotonic()
        lost, wrong, note = CASES[name][0](Path(folder), count, seed)
        return Case(name, count, lost, wrong, round(time.monotonic() - started, 1), note)


def record(cases: list[Case], seed: int) -> dict[str, Any]:
    """Return the document of a run."""
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "seed": seed,
        "cases": [asdict(case) for case in cases],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--runs", type=int)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    found = []
    for name in given.only or CASES:
        try:
            found.append(tried(name, given.runs or max(16, round(given.scale * CASES[name][1])), given.seed))
        except Unavailable as reason:
            sys.stderr.write(f"{name}: left out: {reason}\n")
            continue
        sys.stderr.write(f"{found[-1]}\n")
        if given.out:  # after each case: some take long
            save_text(json.dumps(record(found, given.seed), indent=1) + "\n", given.out)
    sys.exit(any(case.lost or case.wrong for case in found))


if __name__ == "__main__":
    main()

"""The store under fire, with counts: python -m tools.stores.faults --out results/store.faults.json

Every part says how often it was tried and what went wrong: rows lost that had been acknowledged, losses that a recovery
understated, wrong rows that were believed, and commands that did not end as they should. A part that this machine
cannot try, for want of a PostgreSQL server or a C compiler, say, is left out. A part takes the place of its earlier run
in the record, the others stay as they are.
"""

import argparse
import json
import platform
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from blocktune.db.exchange.document import save_text
from tests.support.stores.postgres_server import missing_part
from tools import ROOT, program
from tools.fuzz.drawn import odd_files, odd_requests
from tools.stores import Unavailable, io_faults
from tools.stores.changed_exports import imports
from tools.stores.damaged_files import answers, damages, flipped_bits, flipped_frozen
from tools.stores.input.flips import flips
from tools.stores.input.starts import starts
from tools.stores.server.disk import full_disks
from tools.stores.server.network import network
from tools.stores.server.stops import server_stops
from tools.stores.server.versions import versions

FORMAT, SCHEMA = "blocktune-faults", 2

MEMORY = Path("/dev/shm")
"""Where the stores lie, if it is there: a killed process loses nothing that the kernel has, whatever the disk."""

Work = Callable[[Path, int, int], tuple[int, int, str]]
"""Takes a folder, how often and a seed; returns what was lost, what was wrong, and what else is to be said."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    work: Work
    count: int


@dataclass(frozen=True, slots=True)
class Case:
    """What became of a part.

    lost: acknowledged rows that are gone without a word, or beyond what a recovery said. wrong: rows that were never
    stored, and commands that ended as none should. note: what else is to be said.
    """

    name: str
    tried: int
    lost: int
    wrong: int
    seconds: float
    note: str
    seed: int
    date: str
    commit: str
    python: str = platform.python_version()
    sqlite: str = sqlite3.sqlite_version


def run_program(name: str, folder: Path, tried: int, seed: int) -> dict[str, Any]:
    """Return what a program of this folder prints, in a process of its own.

    Raises:
        RuntimeError: it did not come to its end.
    """
    command = [*program(f"stores.{name}"), str(folder), str(tried), str(seed)]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError(found.stderr[-1000:])
    document: dict[str, Any] = json.loads(found.stdout)
    return document


def cold_starts(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """16 processes create one store at once, again and again."""
    places = [str(folder / f"cold{number}.db") for number in range(tried // 16)]
    found = subprocess.run([*program("stores.herd"), "create", "16", *places], capture_output=True, text=True)
    return 0, int(found.returncode != 0), (found.stdout + found.stderr)[-200:]


def killed_searches(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """Searches are killed at random moments until they have ended."""
    try:
        found = run_program("killed_runs", folder, tried, seed)
    except RuntimeError as error:
        return 1, 0, str(error)[-200:]
    ended = len(found["winners"])
    return 0, 0, f"{found['acknowledged']:,} measurements were acknowledged; {ended} searches came to their end"


def killed_while_locked(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """A search whose store is locked measures, and is killed: what it acknowledged is in its spool."""
    found = run_program("killed_locked", folder, tried, seed)
    return found["lost"], 0, f"{found['acknowledged']:,} measurements were acknowledged"


def failing_disks(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """A write, sync, truncation or read of the store's files fails, once or from then on."""
    try:
        found = io_faults.run(folder, tried, seed)
    except FileNotFoundError as error:
        raise Unavailable("no C compiler") from error
    lost = sum("lost" in each for each in found["wrong"])
    ended = ", ".join(f"{count} {how}" for how, count in sorted(found["ended"].items()))
    return lost, len(found["wrong"]) - lost, f"ended: {ended}{''.join(f'; {each}' for each in found['wrong'][:5])}"


def on_server(work: Work) -> Work:
    """Return a part that needs the programs of PostgreSQL."""

    def tried(folder: Path, count: int, seed: int) -> tuple[int, int, str]:
        if missing_part():
            raise Unavailable(missing_part())
        return work(folder, count, seed)

    return tried


def commands(name: str) -> Work:
    """Return the part of a program that runs commands and judges how they end."""

    def work(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
        found = run_program(name, folder, tried, seed)
        ended = ", ".join(f"{count:,} with {code}" for code, count in sorted(found["ended"].items()))
        broken = "".join(f"; {each['words']}: {each['rule']}" for each in found["broken"][:5])
        stopped = f"; {found['interrupted']} got Ctrl-C" if "interrupted" in found else ""
        return 0, len(found["broken"]), f"ended: {ended}{stopped}{broken}"

    return work


def first_calls(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """Production's first call with a damaged or hostile store: right, in time, and in bounded memory."""
    found = run_program("first_calls", folder, tried, seed)
    note = f"at most {found['most_ms']:.0f} ms over PyTorch's call, and {found['most_mib']:.0f} MiB"
    return 0, len(found["wrong"]), note + "".join(f"; {each}" for each in found["wrong"][:5])


PARTS: dict[str, Part] = {
    "kills": Part("killed searches", killed_searches, 500),
    "locked": Part("killed searches of a locked store", killed_while_locked, 100),
    "disks": Part("failing disks", failing_disks, 2000),
    "damages": Part("damaged files, recovered", damages, 1000),
    "answers": Part("damaged files, read by commands", answers, 1000),
    "commands": Part("commands", commands("cli_fuzz"), 5000),
    "hostile": Part("hostile files, read by every command", commands("hostile_files"), 100),
    "calls": Part("first calls of production", first_calls, 300),
    "bits": Part("flipped bits, read by production", flipped_bits, 5000),
    "frozen": Part("flipped bits and bytes of a frozen file", flipped_frozen, 2000),
    "flips": Part("flipped bits of every other kind of file", flips, 2000),
    "production": Part("starts of production in odd circumstances", starts, 58),
    "endless": Part("files without an end, read by 26 commands", commands("input.endless_files"), 26),
    "passwords": Part("passwords at odd places of commands", commands("input.passwords"), 2000),
    "imports": Part("changed exports, imported", imports, 10_000),
    "files": Part("odd files and rows, read by every parser", odd_files, 10_000),
    "requests": Part("odd requests to the live page", odd_requests, 5000),
    "starts": Part("cold starts", cold_starts, 480),
    "stops": Part("PostgreSQL stops", on_server(server_stops), 60),
    "network": Part("PostgreSQL behind a bad network", on_server(network), 240),
    "full": Part("PostgreSQL on a full disk", on_server(full_disks), 40),
    "versions": Part("PostgreSQL and two versions", on_server(versions), 20),
}
"""What is tried, and how often."""


def try_part(key: str, count: int, seed: int, commit: str) -> Case | str:
    """Return how a part went, in a folder of its own, or why it cannot be tried here."""
    part, started = PARTS[key], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        try:
            lost, wrong, note = part.work(Path(folder), count, seed)
        except Unavailable as reason:
            return f"{key}: left out: {reason}"
    seconds, date = round(time.monotonic() - started, 1), f"{datetime.now(UTC):%Y-%m-%d}"
    note = note.replace(str(ROOT), ".")  # a record is read on other machines
    return Case(part.name, count, lost, wrong, seconds, note, seed, date, commit)


def try_all(counts: dict[str, int], seed: int, jobs: int) -> Iterator[Case | str]:
    """Yield how each part went, so many at once."""
    commit = present_commit()
    if jobs == 1:
        yield from (try_part(key, count, seed, commit) for key, count in counts.items())
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(try_part, key, count, seed, commit) for key, count in counts.items()]):
            yield done.result()


def present_commit() -> str:
    """Return the commit of this checkout, with a plus where its code was changed; empty if it is none."""
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        code = [*git, "status", "--porcelain", "--", ".", ":!results", ":!docs"]
        changed = subprocess.run(code, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.stdout.strip() + ("+" if changed else "")


def keep(case: Case, path: Path) -> None:
    """Put a case into a record, in the place of an earlier run of its part."""
    cases = {case.name: asdict(case)}
    if path.exists():
        known = json.loads(path.read_text())
        if known.get("schema") == SCHEMA:
            cases = {each["name"]: each for each in known["cases"]} | cases
    ordered = [cases[part.name] for part in PARTS.values() if part.name in cases]
    document = {"format": FORMAT, "schema": SCHEMA, "cases": ordered}
    save_text(json.dumps(document, indent=1) + "\n", path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--runs", type=int, help="in the place of the full count")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="parts at once")
    given = parser.parse_args()
    failed = False
    for case in try_all({key: given.runs or PARTS[key].count for key in given.only}, given.seed, given.jobs):
        sys.stderr.write(f"{case}\n")
        if isinstance(case, Case):
            failed |= bool(case.lost or case.wrong)
            if given.out:  # after each part: some take long
                keep(case, given.out)
    sys.exit(failed)


if __name__ == "__main__":
    main()

"""Random commands on random files, in one process: cli_fuzz.py FOLDER RUNS SEED [SHARE]

Every run has to end with an exit code of the list, within a bound, without a traceback, and with nothing that a
terminal would obey. A share of them get Ctrl-C, and have 2 s to end. Prints, as JSON, how many
runs there were, how they ended, and the commands that broke a rule.
"""

import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from blocktune.cli.main import app
from blocktune.cli.main import main as tune
from blocktune.db.exchange.document import document_from, save_document
from blocktune.db.store import ResultStore
from tests.support.command_line import CliRunner
from tests.support.stores.sample_records import winner

EXIT_CODES = (0, 2, 3, 4, 5, 6, 7, 130)
MAX_SECONDS = 10.0
COMPILING, MAX_COMPILING_SECONDS = {"explain", "ladder", "occupancy"}, 120.0
"""Commands that compile kernels, which takes what a compiler takes."""
MAX_MESSAGE = 10_000
INTERRUPTED = 0.1
"""The share of runs that get Ctrl-C."""
MAX_INTERRUPTED_SECONDS, TRIES = 2.0, 3

TITLE = "\x1b]0;owned\x07\x1b[31m\u202e"
WORDS = (
    *("", "0", "-1", "1", "64", "8192", str(2**63), "1e9", "nan", "\u00b2", "h200", "H100", "a100", "nonsense", TITLE),
    *("x" * 5000, "../..", "/", "/dev/null", "~nouser/x", "sqlite://", "sqlite:///q?x", "postgresql://", "a=b"),
    *("forward", "backward", "bf16", "fp32", "causal", "--", "-", "[", "{}", "*", "%20", "\ufffd", "window=5:5"),
)
OPTIONS = (
    *("--db", "--json", "--device", "--seq", "--dim", "--heads", "--batch", "--dtype", "--direction", "--causal"),
    *("--features", "--kernel", "--format", "--trust", "--loss", "--apply", "--recover", "--restore", "--sign"),
    *("--help", "--seed", "--trials", "--time-budget", "--sampler", "--shapes", "--config", TITLE, "--" + "y" * 3000),
    *("--all", "--verify"),
)
SHAPE = "--seq 8192 --dim 64 --device h200"
SENSIBLE = (
    *("list", "list --json", f"best {SHAPE}", f"best {SHAPE} --json", "best --seq 4096 --dim 64 --device h200", "gc"),
    *("import JSON", "import JSON --trust", "merge DB", "merge JSON --trust", "diff DB JSON", "diff JSON JSON --json"),
    *("export out.json --device h200", "export - --device h200", "export out.py --format triton --device h200"),
    *("freeze out.json --device h200", "freeze frozen --all", "list --db JSON", "list --db DB --json", "gc --apply"),
    *("doctor", "doctor --json", "doctor --recover", "doctor --restore", "doctor --recover --json", "buckets"),
    *(f"explain {SHAPE}", f"occupancy {SHAPE}", f"ladder {SHAPE}", "devices", "buckets --loss 1 --apply", "verify"),
)
COMMANDS = (
    *("best", "list", "export", "import", "freeze", "merge", "diff", "buckets", "gc", "occupancy", "explain", "ladder"),
    *(
        "devices",
        "doctor",
        "lab",
        "lab sweeps",
        "lab replay",
        "lab rematch",
        "lab noise",
        "verify",
        "nonsense",
        TITLE,
        "",
    ),
)


HOSTILE = (
    *(f"DROP VIEW {view}" for view in ("dispatch", "user_dispatch")),
    *(f"ALTER TABLE {table} RENAME TO other" for table in ("best", "device", "blocktune_schema")),
    "CREATE TABLE other (id); CREATE VIEW endless AS WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT 1 FROM t) "
    "SELECT n FROM t; CREATE TRIGGER lost AFTER INSERT ON best BEGIN SELECT n FROM endless; END",
    "DROP TABLE trial; "
    "CREATE VIEW trial AS WITH RECURSIVE t(id) AS (SELECT 1 UNION ALL SELECT 1 FROM t) SELECT * FROM t",
    "DROP TABLE device; CREATE VIEW device AS SELECT hex(zeroblob(400000000)) AS id",
    "DROP VIEW dispatch; CREATE VIEW dispatch AS SELECT printf('%900000000d', 1) AS device_key",
    "CREATE TRIGGER gone BEFORE DELETE ON trial BEGIN DELETE FROM best; END",
    "CREATE VIRTUAL TABLE words USING fts5(text)",
    f'CREATE TABLE "{TITLE}" (a)',
    f"UPDATE device SET name = '{TITLE}', key = '{TITLE}'",
    "UPDATE device SET document = '[5]'",
    "UPDATE device SET checksum = NULL, document = json_set(document, '$.num_sms', 0)",
    "UPDATE shape SET document = json_set(document, '$.features', 5)",
    "UPDATE shape SET document = replace(hex(zeroblob(3000000)), '00', '[')",
    "UPDATE config SET document = json_set(document, '$.block_m', -64)",
    "UPDATE best SET checksum = NULL, served_checksum = NULL, created_at = '9999-12-31 00:00:00.000000'",
    "UPDATE best SET time_us = 'x', checksum = NULL",
    "UPDATE best SET origin = x'ff'",
    "UPDATE kernel SET source_hash = 'x' || char(10) || '__import__(\"os\").system(\"id\")'",
    "DELETE FROM shape",
    "DELETE FROM config",
    *(f"UPDATE blocktune_schema SET version_num = {value}" for value in ("'\u00b2'", "'0000'", "'9999'", "5", "x'ff'")),
    "DELETE FROM blocktune_schema",
    "PRAGMA application_id = 7",
    "PRAGMA user_version = 99",
)
"""What a stranger may have done to a store, each by itself or several after each other."""


def hostile(content: bytes, folder: Path, dice: random.Random) -> bytes:
    """Return a store that a stranger has changed on purpose."""
    place = folder / "hostile.db"
    place.write_bytes(content)
    with closing(sqlite3.connect(place, isolation_level=None)) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        for script in dice.sample(HOSTILE, dice.choice((1, 1, 1, 2, 3))):
            with suppress(sqlite3.Error):  # of two, the second may find nothing left
                connection.executescript(script)
        connection.execute("PRAGMA journal_mode = DELETE")
    return place.read_bytes()


def make_files(folder: Path) -> dict[str, bytes]:
    """A sound store and an export, by name."""
    best = winner()
    with ResultStore.open(folder / "sound.db") as store:
        store.set_best(best)
    save_document(document_from(best.device, [best], []), folder / "sound.json")
    for log in folder.glob("sound.db-*"):
        log.unlink()
    return {name: (folder / name).read_bytes() for name in ("sound.db", "sound.json")}


def spoilt(content: bytes, dice: random.Random) -> bytes:
    """The bytes with some damage, or none."""
    way = dice.randrange(6)
    if way == 0:
        return content
    if way == 1:
        return content[: dice.randrange(len(content))]
    if way == 2:
        return dice.randbytes(dice.randrange(5000))
    if way == 3:
        return b"[" * 100_000
    damaged = bytearray(content)
    for _ in range(dice.choice((1, 4, 200))):
        damaged[dice.randrange(len(damaged))] = dice.randrange(256)
    return bytes(damaged)


def command(folder: Path, files: dict[str, bytes], dice: random.Random) -> list[str]:
    """A command as someone might give it on spoilt files, mostly with some words changed."""
    places = {}
    for name, content in files.items():
        kind = name.rpartition(".")[2]
        places[kind.upper()] = folder / f"case.{kind}"
        is_hostile = kind == "db" and dice.random() < 0.4
        places[kind.upper()].write_bytes(hostile(content, folder, dice) if is_hostile else spoilt(content, dice))
    words = [str(places.get(word, word)) for word in dice.choice(SENSIBLE).split()]
    if dice.random() < 0.1:
        words = dice.choice(COMMANDS).split(" ")
    for _ in range(dice.choice((0, 0, 0, 1, 1, 3))):
        changed = dice.choice((dice.choice(OPTIONS), dice.choice(WORDS), str(dice.choice(list(places.values())))))
        at = dice.randrange(len(words) + 1)
        words[at : at + dice.randrange(2)] = [changed]
    return words


def broken_rule(words: list[str], result: Any, seconds: float) -> str:
    """Which rule a run broke; empty if it broke no rule."""
    text = result.stdout + result.stderr
    if result.exit_code not in EXIT_CODES:
        return f"exit code {result.exit_code}: {result.exception!r:.300}"
    if "Traceback" in text:
        return "traceback"
    if not all(sign.isprintable() or sign in "\n\t" for sign in text):
        return "control characters"
    if len(result.stderr) > MAX_MESSAGE:
        return f"{len(result.stderr)} characters"
    most = MAX_COMPILING_SECONDS if COMPILING & set(words) else MAX_SECONDS
    return f"{seconds:.1f} s" if seconds > most else ""


def interrupt(words: list[str], environment: dict[str, str], dice: random.Random) -> str:
    """Return which rule a command breaks that gets Ctrl-C at some moment; empty if it breaks none.

    A busy machine may hold up one that has its end in sight, so it is late only if it is so again and again.
    """
    rule = ""
    for _ in range(TRIES):
        with tempfile.TemporaryFile("w+") as output:
            code, seconds = _run_and_interrupt(words, environment, output.fileno(), dice.uniform(0.0, 0.6))
            output.seek(0)
            text = output.read()
        if code not in EXIT_CODES:
            return f"exit code {code} after Ctrl-C: {text[-300:]!r}"
        if "Traceback" in text:
            return f"traceback after Ctrl-C: {text[-300:]!r}"
        if seconds <= MAX_INTERRUPTED_SECONDS:
            return ""
        rule = f"{seconds:.1f} s after Ctrl-C"
    return rule


def _run_and_interrupt(words: list[str], environment: dict[str, str], output: int, delay: float) -> tuple[int, float]:
    """Return the exit code of a command in a process of its own, and how long it lived after Ctrl-C."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    child = os.fork()
    if not child:
        code = 130
        try:
            code = _exit_code(words, environment, output)
        finally:
            os._exit(code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    time.sleep(delay)
    os.kill(child, signal.SIGINT)
    began = time.monotonic()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        seconds = time.monotonic() - began
        if ended:
            return os.waitstatus_to_exitcode(status), seconds
        if seconds > 5 * MAX_INTERRUPTED_SECONDS:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)


def _exit_code(words: list[str], environment: dict[str, str], output: int) -> int:
    """Return how a command ends in this process, which gets Ctrl-C while the command runs and at no other time."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    sys.argv = ["tune", *words]
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        tune()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:  # in front of the command itself
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return code


def main(folder: Path, runs: int, seed: int, interrupted_share: float) -> None:
    os.chdir(folder)
    environment = {"HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), "XDG_DATA_HOME": str(folder / "data")}
    files, dice = make_files(folder), random.Random(seed)
    ended, broken, stopped = Counter[int](), [], 0
    for _ in range(runs):
        words = command(folder, files, dice)
        place = (
            {"BLOCKTUNE_DB": str(folder / "case.db")} if dice.random() < 0.8 else {"BLOCKTUNE_DB": dice.choice(WORDS)}
        )
        environment |= {name: value.replace("\0", "") for name, value in place.items()}
        for log in folder.glob("case.db?*"):
            log.unlink()
        if dice.random() < interrupted_share:
            stopped += 1
            if rule := interrupt(words, environment, dice):
                broken.append(_case(words, environment, rule))
            continue
        started = time.monotonic()
        result = CliRunner().invoke(app, words, env=environment)
        rule = broken_rule(words, result, time.monotonic() - started)
        ended[result.exit_code] += 1
        if rule:
            broken.append(_case(words, environment, rule))
    sys.stdout.write(json.dumps({"runs": runs, "ended": dict(ended), "interrupted": stopped, "broken": broken}))


def _case(words: list[str], environment: dict[str, str], rule: str) -> dict[str, Any]:
    return {"words": [word[:80] for word in words], "db": environment["BLOCKTUNE_DB"][:80], "rule": rule}


if __name__ == "__main__":
    main(
        Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]) if len(sys.argv) > 4 else INTERRUPTED
    )

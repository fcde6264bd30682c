"""Random commands on random files, in one process: cli_fuzz.py FOLDER RUNS SEED

Every run has to end with an exit code of the list, within a bound, without a traceback, and with nothing that a
terminal would obey. Prints, as JSON, how many runs there were, how they ended, and the commands that broke a rule.
"""

import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from blocktune.cli.main import app
from blocktune.db.exchange.document import document_from, save_document
from blocktune.db.records.records import Best, Environment
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import Origin
from blocktune.tuner.search.shape_defaults import complete_shape

EXIT_CODES = (0, 2, 3, 4, 5, 7, 130)
MAX_SECONDS = 10.0
COMPILING, MAX_COMPILING_SECONDS = {"explain", "ladder", "occupancy"}, 120.0
"""Commands that compile kernels, which takes what a compiler takes."""
MAX_MESSAGE = 10_000

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
    *("devices", "doctor", "sweeps", "replay", "rematch", "verify", "noise", "nonsense", TITLE, ""),
)


def winner() -> Best:
    kernel, device, shape = get_kernel("flash_fwd"), device_named("h200"), complete_shape(8192, 64)
    return Best(
        device=device,
        environment=Environment(triton="3.6.0", ptxas="12.8.93", torch="2.13.0"),
        shape=shape,
        config=kernel.default_config(shape, device.limits),
        kernel_hash=kernel.source_hash,
        origin=Origin.MEASURED,
        time_us=100.0,
    )


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
        places[kind.upper()].write_bytes(spoilt(content, dice))
    words = [str(places.get(word, word)) for word in dice.choice(SENSIBLE).split()]
    if dice.random() < 0.1:
        words = [dice.choice(COMMANDS)]
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


def main(folder: Path, runs: int, seed: int) -> None:
    os.chdir(folder)
    environment = {"HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), "XDG_DATA_HOME": str(folder / "data")}
    files, dice = make_files(folder), random.Random(seed)
    ended, broken = Counter[int](), []
    for _ in range(runs):
        words = command(folder, files, dice)
        place = (
            {"BLOCKTUNE_DB": str(folder / "case.db")} if dice.random() < 0.8 else {"BLOCKTUNE_DB": dice.choice(WORDS)}
        )
        environment |= {name: value.replace("\0", "") for name, value in place.items()}
        for log in folder.glob("case.db?*"):
            log.unlink()
        started = time.monotonic()
        result = CliRunner().invoke(app, words, env=environment)
        rule = broken_rule(words, result, time.monotonic() - started)
        ended[result.exit_code] += 1
        if rule:
            broken.append(
                {"words": [word[:80] for word in words], "db": environment["BLOCKTUNE_DB"][:80], "rule": rule}
            )
    sys.stdout.write(json.dumps({"runs": runs, "ended": dict(ended), "broken": broken}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

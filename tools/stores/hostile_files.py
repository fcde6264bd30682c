"""Every command on hostile files: hostile_files.py FOLDER FILES SEED

Each command gets a changed store and a changed export in the place of its database and its arguments, and has to end as
those of cli_fuzz.py do, in 5 s. Prints, as JSON, how they ended and the commands that broke a rule.
"""

import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

from blocktune.cli.main import app
from tests.support.command_line import CliRunner
from tools.stores.changed_exports import spoil
from tools.stores.cli_fuzz import SENSIBLE, TRIES, broken_rule, hostile, make_files

MAX_SECONDS = 5.0
"""What a busy machine holds up is tried again, as in cli_fuzz.py."""

OTHERS = (
    *(
        "kernels",
        "kernels DB",
        "kernels --freeze kernels.json",
        "export - --trials --device h200",
        "lab rematch DB JSON",
    ),
    *("export out.csv --format csv", "export folder --format vllm --device h200", "export - --format kernel-tuner"),
    *("lab sweeps show DB", "lab sweeps write folder", "lab replay DB", "lab replay --untuned --winners JSON"),
    "lab record folder --shapes JSON",
    *(
        "lab calibrate DB --out out.correction.json",
        "run --shapes DB --device h200",
        "freeze JSON --verify DB",
        "report DB",
    ),
    *("profile --seq 8192 --dim 64 --device h200 --from DB", "roofline --device h200", "lab noise --seq 64 --dim 64"),
    *("freeze out.json --device h200 --sign DB", "report JSON --out out.html", "bench --seq 64 --dim 64"),
    "contribute JSON --verify DB",
)
"""What a stranger's file may be given to in addition: as a sweep, a list of shapes, a key, an export."""

EVERY = tuple(line for line in (*SENSIBLE, *OTHERS) if "--json" not in line)
"""The other half of their code is that of the same commands without `--json`."""


Files = tuple[bytes, bytes]
"""A database and an export."""


def refill(folder: Path, files: Files) -> dict[str, str]:
    """Put the files where commands read them, without logs of those before. Returns what names them in a command."""
    for left in folder.glob("case.*"):
        left.unlink()
    places = {"DB": folder / "case.db", "JSON": folder / "case.json"}
    for place, content in zip(places.values(), files, strict=True):
        place.write_bytes(content)
    return {name: str(place) for name, place in places.items()}


def change_values(export: bytes, dice: random.Random) -> bytes:
    """Return an export with some changed values, whose checksums are taken away."""
    document = json.loads(export)
    for row in document["bests"]:
        del row["checksum"]
    for _ in range(dice.choice((1, 2, 5))):
        spoil(document, dice)
    return json.dumps(document).encode()


def judge_command(line: str, folder: Path, files: Files, environment: dict[str, str]) -> tuple[int, str]:
    """Return how a command ended on files, and which rule it broke."""
    code, rule = 0, ""
    for _ in range(TRIES):
        places = refill(folder, files)
        words = [places.get(word, word) for word in line.split()]
        started = time.monotonic()
        result = CliRunner().invoke(app, words, env=environment)
        seconds, code = time.monotonic() - started, result.exit_code
        rule = broken_rule(words, result, 0.0)
        if rule or seconds <= MAX_SECONDS:
            return code, rule
        rule = f"{seconds:.1f} s"
    return code, rule


def main(folder: Path, files: int, seed: int) -> None:
    os.chdir(folder)
    environment = {"HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), "XDG_DATA_HOME": str(folder / "data")}
    environment |= {"BLOCKTUNE_DB": str(folder / "case.db")}
    sound, dice = make_files(folder), random.Random(seed)
    for line in EVERY:  # what is compiled once takes what a compiler takes
        judge_command(line, folder, (sound["sound.db"], sound["sound.json"]), environment)
    ended, broken = Counter[int](), []
    for _ in range(files):
        pair = hostile(sound["sound.db"], folder, dice), change_values(sound["sound.json"], dice)
        for line in EVERY:
            code, rule = judge_command(line, folder, pair, environment)
            ended[code] += 1
            if rule:
                broken.append({"words": line, "rule": rule})
    sys.stdout.write(json.dumps({"ended": dict(ended), "broken": broken}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

"""Commands with a password at odd places in odd spellings: passwords.py FOLDER RUNS SEED

Nothing that a command prints may hold it, whatever the place and spelling. Prints, as JSON, how the commands ended and
which broke a rule.
"""

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from blocktune.cli.main import app
from tests.support.command_line import CliRunner
from tools.stores.cli_fuzz import broken_rule, make_files

SECRET = "hunter2secret"
SIGNS = "abc12 '\"@:/=#?+\\&;,()[]{}%é\t\u202e!$*~|<>"
PLACES = (
    *("postgresql+psycopg://u:{}@127.0.0.1:1/x", "postgresql+psycopg://127.0.0.1:1/x?user=u&password={}"),
    *("postgresql://u:{}@127.0.0.1:1/x", "postgresql:/u:{}@127.0.0.1:1/x", "u:{}@127.0.0.1:1/x", "//u:{}@h/x"),
    *("sqlite:///o.db?password={}", "mysql://u:{}@127.0.0.1:1/x", "postgresql+psycopg://u:{}@[::1]:1/x"),
    *("host=127.0.0.1 port=1 password={}", "postgresql+psycopg://u:{}@127.0.0.1:1/x?sslmode=nonsense"),
    *("postgresql+psycopg://127.0.0.1:1/x?sslpassword={}", "postgresql%3A%2F%2Fu%3A{}%40h%2Fx"),
)
COMMANDS = (
    *("list --db URL", "list URL", "URL", "--URL", "list --URL", "list --db=URL", "best --seq 64 --dim 64 --db URL"),
    *("best --seq URL", "best --seq 64 --dim 64 --device URL", "export - --db URL", "export out.json --format URL"),
    *("export URL --format optuna --db DB", "export URL --device h200 --db DB", "import URL", "import JSON --db URL"),
    *("merge URL", "diff URL JSON", "report URL --out out.html", "report JSON --out URL", "report --against URL"),
    *("doctor --db URL", "doctor --recover --db URL", "doctor --restore --db URL", "kernels URL", "kernels --db URL"),
    *("kernels --freeze URL --db DB", "verify URL", "verify --db URL", "gc URL", "gc --db URL", "buckets --db URL"),
    *("freeze URL --device h200 --db DB", "freeze out.json --device h200 --sign URL --db DB", "freeze x --verify URL"),
    *("run --shapes URL --device h200", "run --seq 64 --dim 64 --db URL", "lab replay URL"),
    *("lab sweeps show URL", "lab rematch URL URL", "lab calibrate URL --out out.json", "lab URL", "occupancy URL"),
    *("profile --seq 64 --dim 64 --device h200 --from URL", "roofline --device URL", "explain --kernel URL"),
    *("list", "doctor", "gc", "export - --device h200"),  # by the variable
)


def password(dice: random.Random) -> str:
    """Return a password of odd signs around a word that is looked for."""
    before, after = ("".join(dice.choices(SIGNS, k=dice.choice((0, 0, 1, 3)))) for _ in range(2))
    return f"{before}{SECRET}{after}"


def url_of(dice: random.Random) -> str:
    """Return a URL with a password. In a query, @ and & are written as %40 and %26: else they end a name, and the
    option."""
    place, word = dice.choice(PLACES), password(dice)
    return place.format(word.replace("@", "%40").replace("&", "%26") if "={}" in place else word)


def main(folder: Path, runs: int, seed: int) -> None:
    os.chdir(folder)
    make_files(folder)
    dice, ended, broken = random.Random(seed), Counter[int](), list[dict[str, Any]]()
    environment = {"HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), "XDG_DATA_HOME": str(folder / "data")}
    names = {"DB": str(folder / "sound.db"), "JSON": str(folder / "sound.json")}
    for number in range(runs):
        line = COMMANDS[number % len(COMMANDS)]
        url = url_of(dice)
        words = [names.get(word, word).replace("URL", url) for word in line.split(" ")]
        variable = {"BLOCKTUNE_DB": names["DB"] if "URL" in line else url}
        result = CliRunner().invoke(app, words, env=environment | variable)
        rule = broken_rule(words, result, 0.0)
        if SECRET in result.stdout + result.stderr:
            rule = "a password is shown"
        ended[result.exit_code] += 1
        if rule:
            broken.append({"words": f"{line} with {url!r}", "rule": rule})
    sys.stdout.write(json.dumps({"ended": dict(ended), "broken": broken}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

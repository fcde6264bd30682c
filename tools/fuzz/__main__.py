"""Fuzzes the parsers, each for a while, from the inputs that earlier runs found: python -m tools.fuzz --seconds 60

It needs `pip install atheris`. What reaches new places is added to the archives of `tests/data/corpus`. An input that
breaks a rule is left in the folder `--crashes`, and ends the run with 1.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

from tools import program
from tools.fuzz.corpus import MOST_BYTES, archive_of, load, save
from tools.fuzz.parsers import PARSERS

INPUT_SECONDS = 10
"""How long one input may take."""


def fuzz(name: str, seconds: int, crashes: Path) -> bool:
    """Fuzz a parser, print what became of its corpus, and return whether every input kept the rules."""
    with tempfile.TemporaryDirectory(prefix=f"fuzz-{name}-") as folder:
        found, merged = Path(folder) / "found", Path(folder) / "merged"
        for place in (found, merged, crashes):
            place.mkdir(exist_ok=True, parents=True)
        before = [*load(archive_of(name)), *PARSERS[name].seeds()]
        for each in before:
            (found / sha256(each).hexdigest()[:16]).write_bytes(each)
        known = set(crashes.iterdir())
        options = [f"-max_total_time={seconds}", f"-max_len={MOST_BYTES}", f"-timeout={INPUT_SECONDS}", "-verbosity=0"]
        script = _script(name, Path(folder))
        ended = _run(script, [str(found), *options, f"-artifact_prefix={crashes.resolve()}/{name}-"])
        broken = set(crashes.iterdir()) - known
        for path in broken:
            sys.stdout.write(f"{name}: {path} breaks a rule:\n{ended.stderr[-3000:]}\n")
        _run(script, ["-merge=1", str(merged), str(found), "-verbosity=0"])
        count = save(archive_of(name), [path.read_bytes() for path in merged.iterdir()])
        new = len(list(found.iterdir())) - len(set(before))
        sys.stdout.write(f"{name}: {new} new inputs; the corpus keeps {count}\n")
    return not broken


def _script(name: str, folder: Path) -> Path:
    """Return a script that runs the fuzzer of a parser: libFuzzer starts itself by one word."""
    script = folder / "guided"
    command = shlex.join([*program("fuzz.guided"), name, str(script)])
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o755)
    return script


def _run(script: Path, options: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(script), *options], capture_output=True, text=True, errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"Of {', '.join(PARSERS)}; all by default.")
    parser.add_argument("--seconds", type=int, default=60, help="For each.")
    parser.add_argument("--crashes", type=Path, default=Path("crashes"), help="Where inputs go that break a rule.")
    given = parser.parse_args()
    sound = [fuzz(name, given.seconds, given.crashes) for name in given.names or PARSERS]
    sys.exit(not all(sound))


if __name__ == "__main__":
    main()

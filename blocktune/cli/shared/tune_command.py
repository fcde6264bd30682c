"""The command `tune`, a second name of `blocktune`, which packages such as torchtune and Ray install, too.

pip lets the last one that is installed write the script, and removes the script with any of them. Ours gives way: it
runs the other package's command.
"""

import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from blocktune.kernels.files.reading import SYSTEM_BYTES, read_bytes

OURS = "blocktune"
RAY, RAYS_WORDS = "ray", frozenset({"add-note", "list-experiments", "list-trials", "ls", "lsx"})
"""Ray's command has few words, and none of ours is among them: each of the two packages keeps its own."""


def tune_commands() -> list[EntryPoint]:
    """Return the commands `tune` of all installed packages, Ray's last."""
    found = [each for each in entry_points(group="console_scripts", name="tune") if each.dist is not None]
    return sorted(found, key=lambda each: (owner(each) == RAY, owner(each)))


def owner(command: EntryPoint) -> str:
    """Return the name of the package that a command comes with."""
    return command.dist.name.lower() if command.dist is not None else ""


def command_meant(words: list[str]) -> EntryPoint | None:
    """Return the command of another package that these words after `tune` are for; None if they are for ours."""
    others = [each for each in tune_commands() if owner(each) != OURS]
    return next((each for each in others if owner(each) != RAY or RAYS_WORDS & set(words[:1])), None)


def script_owner(commands: Iterable[EntryPoint], folder: Path) -> EntryPoint | None:
    """Return which of these commands the script `tune` in a folder runs; None where there is no script, or another."""
    script = folder / "tune"
    text = read_bytes(script, SYSTEM_BYTES).decode(errors="replace") if script.is_file() else ""
    return next((each for each in commands if f"from {each.module} import" in text), None)


def run_command(command: EntryPoint) -> None:
    """Run a command of another package, and end as it does."""
    sys.exit(command.load()())

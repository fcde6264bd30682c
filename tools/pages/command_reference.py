"""Every command with its flags, from the texts that `--help` prints, and every variable of the environment."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import typer.main

from blocktune.cli.main import app
from blocktune.kernels.files.variables import VARIABLES
from tools.pages.document_tables import escape

BLOCK = re.compile(r"<!-- (?P<part>commands|variables) -->\n.*?<!-- /(?P=part) -->", re.DOTALL)
EXAMPLES = "\b\n"
"""Begins a paragraph of help whose lines are commands."""

SHARED = 5
"""How many commands have a flag with one meaning where it stands in the table of shared flags."""

SHAPE_BEGIN, SHAPE_END = "`--seq`", "`--features`"
"""The flags of a shape stand between these in the list of shared ones."""

DEFAULT = re.compile(r"\s*\[default: (?P<default>.*)\]$")


def with_commands(page: str) -> str:
    """Return a page in which what stands between `<!-- commands -->` and `<!-- /commands -->` is the reference, and so
    for `variables`."""
    parts = {"commands": reference, "variables": variable_table}
    return BLOCK.sub(
        lambda match: f"<!-- {match['part']} -->\n{parts[match['part']]()}\n<!-- /{match['part']} -->", page
    )


def variable_table() -> str:
    """Return a row for each variable of the environment."""
    lines = ["| variable | meaning | value | default |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{each.name}` | {escape(each.meaning)} | {each.values} | {each.default} |" for each in VARIABLES.values()
    ]
    return "\n".join(lines)


def reference() -> str:
    """Return the flags that many commands share, then a section a command, in the order of `tune --help`."""
    commands = leaf_commands()
    shared = _shared_flags([flag for command in commands.values() for flag in _flags(command)])
    sections = [_section(name, command, shared) for name, command in commands.items()]
    return "\n\n".join(["### Shared flags", _table("flag", list(shared.values()), _flag), *sections])


def leaf_commands() -> dict[str, Any]:
    """Return every command that is no group, by its words after `tune`."""
    return dict(_commands(typer.main.get_command(app)))


def _commands(group: Any, words: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{words}{name} ")
        else:
            yield f"{words}{name}", command


def _flags(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "option"]


def _key(option: Any) -> tuple[str, ...]:
    """Return what makes a flag of two commands the same: its name, its meaning and its default."""
    return (_flag(option), *_meaning(option))


def _shared_flags(flags: list[Any]) -> dict[tuple[str, ...], Any]:
    """Return the flags that at least `SHARED` commands have, by their keys."""
    counts = Counter(map(_key, flags))
    return {_key(flag): flag for flag in flags if counts[_key(flag)] >= SHARED}


def _section(name: str, command: Any, shared: dict[tuple[str, ...], Any]) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    own = [flag for flag in _flags(command) if _key(flag) not in shared]
    others = [f"`{_flag(flag)}`" for flag in _flags(command) if _key(flag) in shared]
    parts = [f"### tune {name}", *(_paragraph(text) for text in command.help.split("\n\n"))]
    if arguments:
        parts.append(_table("argument", arguments, lambda argument: argument.name.upper()))
    parts += [_table("flag", own, _flag)] if own else []
    return "\n\n".join([*parts, f"Shared flags: {_list(others)}."] if others else parts)


def _list(flags: list[str]) -> str:
    """Return the names of flags; those of a shape, which come one after the other, by the first and the last."""
    if not {SHAPE_BEGIN, SHAPE_END} <= set(flags):
        return ", ".join(flags)
    begin, end = flags.index(SHAPE_BEGIN), flags.index(SHAPE_END)
    return ", ".join((*flags[:begin], f"{SHAPE_BEGIN} to {SHAPE_END}", *flags[end + 1 :]))


def _paragraph(text: str) -> str:
    """Return a paragraph of help, or a block of examples."""
    if text.startswith(EXAMPLES):
        return f"```sh\n{text.removeprefix(EXAMPLES).strip()}\n```"
    return text.strip()


def _table(heading: str, parameters: list[Any], title: Any) -> str:
    """Return a row for each parameter; without defaults where none has one."""
    columns = 2 if any(_meaning(each)[1] for each in parameters) else 1
    rows: list[tuple[str, ...]] = [(f"`{title(each)}`", *map(escape, _meaning(each))) for each in parameters]
    head, *lines = (f"| {' | '.join(row[: 1 + columns])} |" for row in ((heading, "meaning", "default"), *rows))
    return "\n".join((head, "|---" * (1 + columns) + "|", *lines))


def _flag(option: Any) -> str:
    return ", ".join(option.opts) + (f" {option.metavar}" if option.metavar else "").replace("|", "\\|")


def _meaning(parameter: Any) -> tuple[str, str]:
    """Return what a parameter means, and its default: the one that its help names, else its value if it has one."""
    text = parameter.help or ""
    named = DEFAULT.search(text)
    text = DEFAULT.sub("", text)
    value = "" if parameter.default is None or parameter.default is False else str(parameter.default)
    return text.strip(), named["default"] if named else value

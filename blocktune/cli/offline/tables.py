"""Tables of configs and of instructions on the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from blocktune.cli.output.render import note, print_table, say

if TYPE_CHECKING:
    from blocktune.tuner.dry_run.config_table import OfflineTable
    from blocktune.tuner.profile.instruction_mix import InstructionMix

OPTIONAL = ("occupancy", "least time")
"""Columns that a narrow terminal may leave out."""

SHOWN_LINES = 8
"""Source lines of reloads in a text; JSON has all of them."""


def print_config_tables(tables: "Sequence[OfflineTable]", *, brief: bool = False) -> None:
    """Print tables, and that their order is none by time; brief: without bytes, operations and instructions."""
    from blocktune.tuner.dry_run.config_table import COLUMNS, NO_TIME

    for table in tables:
        print_table(COLUMNS, table.cells(), title=table.title, optional=OPTIONAL)
        if text := table.flaw_counts if brief else table.words():
            say(text)
        say("")
    say(NO_TIME)


def print_mix(mix: "InstructionMix") -> None:
    """Print the instructions of a warp by kind, and where the loop, or code without one, reloads and stores spilled
    registers."""
    counted, where = (mix.loop, "in a round of the loop") if mix.loop else (mix.total, "in all of the code")
    whole = sum(counted.values())
    print_table(
        ("instructions of a warp", where, "share", *(["in all of the code"] if mix.loop else [])),
        [
            (kind, count, f"{100 * count / whole:.1f} %", *([mix.total[kind]] if mix.loop else []))
            for kind, count in counted.items()
        ],
    )
    _print_lines("reloads of spilled registers", where, mix.reloads)
    _print_lines("stores of spilled registers", where, mix.stores)


def _print_lines(title: str, where: str, lines: Sequence[tuple[str, int]]) -> None:
    """Print the lines with the most of something, and say how much is left out."""
    if not lines:
        return
    say("")
    print_table((title, where), lines[:SHOWN_LINES])
    rest = lines[SHOWN_LINES:]
    if rest:
        note(f"left out: {sum(count for _, count in rest)} {title}, at {len(rest)} other lines; --json has all")

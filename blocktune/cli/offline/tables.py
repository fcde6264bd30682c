"""Tables of configs on the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from blocktune.cli.output.render import print_table, say

if TYPE_CHECKING:
    from blocktune.tuner.dry_run.config_table import OfflineTable

OPTIONAL = ("occupancy", "least time")
"""Columns that a narrow terminal may leave out."""


def print_config_tables(tables: "Sequence[OfflineTable]", *, brief: bool = False) -> None:
    """Print tables, and that their order is none by time; brief: without bytes, operations and instructions."""
    from blocktune.tuner.dry_run.config_table import COLUMNS, NO_TIME

    for table in tables:
        print_table(COLUMNS, table.cells(), title=table.title, optional=OPTIONAL)
        if text := table.flaw_counts if brief else table.words():
            say(text)
        say("")
    say(NO_TIME)

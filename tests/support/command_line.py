"""Typer's runner of commands, for this process. It builds the tree of a program's commands once, and not for each
command: ours takes 20 ms, longer than most commands do."""

from functools import cache

from typer import testing
from typer.testing import CliRunner, Result

__all__ = ["CliRunner", "Result"]

testing._get_command = cache(testing._get_command)

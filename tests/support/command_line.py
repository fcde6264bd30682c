"""Typer's runner of commands in this process, which builds the tree of a program's commands once and not for each of
them: for ours that takes 20 ms, longer than most commands."""

from functools import cache

from typer import testing
from typer.testing import CliRunner, Result

__all__ = ["CliRunner", "Result"]

testing._get_command = cache(testing._get_command)

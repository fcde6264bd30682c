"""Typer's runner of commands, for this process. It builds the tree of a program's commands once, and not for each
command: ours takes 20 ms, longer than most commands do."""

import inspect
from functools import cache, partial

from typer import testing
from typer.testing import Result

__all__ = ["CliRunner", "Result"]

testing._get_command = cache(testing._get_command)

# Click 8.1, which the lowest Typer needs, puts stderr into stdout unless it is told not to.
_APART = {"mix_stderr": False} if "mix_stderr" in inspect.signature(testing.CliRunner).parameters else {}
CliRunner = partial(testing.CliRunner, **_APART)

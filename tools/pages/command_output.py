"""The output of a command in a page: the block `<!-- output tune best --seq 8192 ... -->` runs it.

The command finds an empty database, so that its answer comes from the results that ship.
"""

import re
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory

from typer.testing import CliRunner

from blocktune.cli.main import app
from blocktune.kernels.files.variables import DB
from blocktune.kernels.values.errors import UsageError

BLOCK = re.compile(r"<!-- output tune (?P<words>[^\n]+) -->\n.*?<!-- /output -->", re.DOTALL)


def with_output(page: str) -> str:
    """Return a page in which every block `<!-- output COMMAND -->` shows what the command prints on stdout.

    Raises:
        UsageError: a command does not end with 0.
    """
    return BLOCK.sub(lambda match: _block(match["words"]), page)


def _block(words: str) -> str:
    return f"<!-- output tune {words} -->\n```console\n$ tune {words}\n{output(words).rstrip()}\n```\n<!-- /output -->"


def output(words: str) -> str:
    """Return what a command prints on stdout.

    Args:
        words: the command without `tune`, as for a shell.

    Raises:
        UsageError: it does not end with 0.
    """
    with TemporaryDirectory() as folder:
        result = CliRunner().invoke(app, shlex.split(words), env={DB.name: str(Path(folder, "empty.db"))})
    if result.exit_code:
        raise UsageError(f"`tune {words}` of a page ended with {result.exit_code}: {result.stderr}Change the page.")
    return result.stdout

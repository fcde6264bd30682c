"""Commands of `tune`, a word a line, that read, move and show results. `DB`, `JSON` and `OUT` stand for files."""

import os
import tempfile
import time
from functools import cache
from pathlib import Path

from blocktune.cli.main import app
from tests.support.command_line import CliRunner
from tools.stores.cli_fuzz import SENSIBLE, broken_rule, make_files

SAFE = frozenset(("best", "list", "export", "import", "freeze", "merge", "diff", "buckets", "gc", "devices", "doctor"))
"""What neither compiles, measures nor listens."""
_NO_PATH = ("/", "~", "..", "$", "\0")
"""What could name a file outside the folder of the run."""


@cache
def _files() -> dict[str, bytes]:
    """Return the files of the run, in a folder that becomes the current one."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    os.chdir(folder)
    return make_files(folder)


def read_command(data: bytes) -> None:
    """Run a command.

    Raises:
        AssertionError: it ended as no command may.
    """
    words = data.decode("utf-8", "replace").split("\n")
    if words[0] not in SAFE or any(sign in word for word in words for sign in _NO_PATH):
        return
    files = _files()
    for name, content in files.items():
        Path(f"case.{name.rpartition('.')[2]}").write_bytes(content)
    for log in Path().glob("case.db?*"):
        log.unlink()
    places = {"DB": "case.db", "JSON": "case.json", "OUT": "out.json"}
    given = [places.get(word, word) for word in words]
    began = time.monotonic()
    home = str(Path.cwd())
    result = CliRunner().invoke(app, given, env={"BLOCKTUNE_DB": "case.db", "HOME": home, "XDG_STATE_HOME": home})
    rule = broken_rule(given, result, time.monotonic() - began)
    assert not rule, f"{rule}: {given!r:.300}"


def command_seeds() -> list[bytes]:
    """Return the sensible commands of the grammar of `tools.stores.cli_fuzz`."""
    return [line.replace(" ", "\n").encode() for line in SENSIBLE if line.split()[0] in SAFE]

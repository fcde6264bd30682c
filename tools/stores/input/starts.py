"""Starts of production in odd circumstances: each calls attention as odd_first_calls.py does, and has to be right."""

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from blocktune.kernels.files.variables import VARIABLES
from tests.support.fakes.dispatch_fakes import best, config, shape_like, store_with
from tests.support.stores import bad_stores
from tests.support.stores.odd_values import KINDS, odd_value
from tools import program

MAX_SECONDS = 300.0
WARNING = "Traceback (most recent call last)"

Prepared = Callable[[Path], Path]


@dataclass(frozen=True, slots=True)
class Start:
    """variables: of the environment; None takes one away. shell: what a shell does first. options: of Python. spoil:
    what becomes of the store."""

    variables: Mapping[str, str | None] = field(default_factory=dict)
    shell: str = ""
    options: tuple[str, ...] = ()
    spoil: Callable[[Path], object] | None = None


def starts(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """Every circumstance is tried once, `tried` of them."""
    del seed
    wrong = [
        words for name, start in list(circumstances(folder).items())[:tried] if (words := _wrong(folder, name, start))
    ]
    return 0, len(wrong), "; ".join(wrong[:5])


def _wrong(folder: Path, name: str, start: Start) -> str:
    """Return what went wrong in a circumstance; empty if nothing did."""
    place = folder / name.replace(" ", "-").replace("/", "-")
    place.mkdir()
    store = store_with(place / "store.db", best(shape_like(32), config()))
    if start.spoil is not None:
        start.spoil(store)
    given = {"BLOCKTUNE_DB": str(store), "XDG_STATE_HOME": str(place / "state")} | dict(start.variables)
    environment = {key: value for key, value in (os.environ | given).items() if value is not None}
    python, *words = program("stores.odd_first_calls")
    command = " ".join(shlex.quote(word) for word in (python, *start.options, *words))
    line = ["/bin/sh", "-c", f"{start.shell or ':'}; exec {command}"]
    began = time.monotonic()
    done = subprocess.run(
        line,
        capture_output=True,
        text=True,
        errors="replace",
        env=environment,
        cwd=place,
        timeout=MAX_SECONDS,
        check=False,
    )
    seconds = time.monotonic() - began
    if done.returncode or WARNING in done.stderr or "right" not in done.stdout:
        return f"{name}: {done.returncode} after {seconds:.0f} s, {done.stdout[-50:]!r}, {done.stderr[-300:]!r}"
    return ""


def circumstances(folder: Path) -> dict[str, Start]:
    """Return what may be odd about a process, by names."""
    file, closed = folder / "file", folder / "closed"
    file.write_text("no folder")
    closed.mkdir(mode=0o500)
    values = {f"variables of {kind}": Start(dict.fromkeys(VARIABLES, odd_value(folder, kind))) for kind in KINDS}
    return values | _homes(file, closed) | _pythons() | _limits() | _stores()


def _homes(file: Path, closed: Path) -> dict[str, Start]:
    """Places of a user that are missing, no folders, or not to be written."""
    homes = {
        "no": None,
        "a missing": f"{file.with_name('missing')}/x",
        "a file as": f"{file}",
        "a relative": "here",
        "a long": "/" + "x" * 5000,
        "a two-line": f"{file.with_name('two')}\nlines\u202e",
        "a device as": "/dev/full",
        "a read-only": f"{closed}",
    }
    found = {f"{name} home": Start(_home(value)) for name, value in homes.items()}
    return found | {
        "no temporary folder": Start({"TMPDIR": f"{file.with_name('missing')}"}),
        "a read-only current folder": Start(shell=f"cd {closed}"),
    }


def _home(value: str | None) -> dict[str, str | None]:
    return {"HOME": value, "XDG_STATE_HOME": value, "XDG_DATA_HOME": value, "BLOCKTUNE_DB": None}


def _pythons() -> dict[str, Start]:
    """Ways of Python and of the terminal."""
    return {
        "the plain locale": Start({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}),
        "no assertions": Start(options=("-O",)),
        "no docstrings": Start(options=("-OO",)),
        "warnings as errors": Start(options=("-W", "error::UserWarning")),
        "development mode": Start(options=("-X", "dev")),
        "a closed input": Start(shell="exec <&-"),
        "a closed error output": Start(shell="exec 2>&-"),
        "a full error output": Start(shell="exec 2>/dev/full"),
        "a clock of the next century": Start({"SOURCE_DATE_EPOCH": "9999999999", "TZ": "Nowhere/Else"}),
        "no new bytecode": Start(options=("-B",)),
        "hashes of one seed": Start({"PYTHONHASHSEED": "0"}),
    }


def _limits() -> dict[str, Start]:
    """Limits of the operating system."""
    return {
        "few open files": Start(shell="ulimit -n 64"),
        "files that may not grow": Start(shell="ulimit -f 0"),
        "no core files": Start(shell="ulimit -c 0"),
        "12 GiB of addresses": Start(shell="ulimit -v 12582912"),
        "a small stack": Start(shell="ulimit -s 1024"),
        "no mode for others": Start(shell="umask 0777"),
        "a low priority": Start(shell="renice -n 19 $$ >/dev/null"),
    }


def _stores() -> dict[str, Start]:
    """What may have become of the store."""
    bad = {f"a store that is {change.__name__}": change for change, _ in bad_stores.BAD_STORES[:8]}
    links: dict[str, Callable[[Path], object]] = {
        "a link loop as store": lambda path: (path.unlink(), path.symlink_to(path.name)),
        "a device as store": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
        "a store of everybody": lambda path: path.chmod(0o666),
        "a store of a newer version": bad_stores.BAD_STORES[8][0],
        "a log of another store": lambda path: Path(f"{path}-wal").write_bytes(os.urandom(20_000)),
        "a store from the future": lambda path: os.utime(path, (9e9, 9e9)),
    }
    return {name: Start(spoil=change) for name, change in (bad | links).items()}

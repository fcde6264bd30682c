"""A PostgreSQL server of a test's own: it can be stopped, killed, followed by a standby and given certificates.

Where there is none, its tests are skipped with a reason; with BLOCKTUNE_POSTGRESQL=required they fail instead.
"""

import glob
import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ADMIN = "tester"

_OWNERS = ("postgres", "nobody")
"""Accounts that a server of root's may run as: PostgreSQL refuses root, and unpacked packages bring no account."""


def missing_part() -> str:
    """Return why no server can be had here; empty where one can."""
    if _binaries() is None:
        return "no PostgreSQL server: initdb is neither under /usr/lib/postgresql nor on the PATH"
    if find_spec("psycopg") is None:
        return "psycopg is not installed, so PostgreSQL cannot be reached"
    return ""


def need_server() -> None:
    """Skip the test where no server can be had, or let it fail where one is required."""
    reason = missing_part()
    if reason and os.environ.get("BLOCKTUNE_POSTGRESQL") == "required":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


def free_port() -> int:
    """Return a port of this machine that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def running_server(settings: Mapping[str, str] | None = None) -> "Iterator[PostgresServer]":
    """Yield a server that runs, and that is gone afterwards with all it holds."""
    with new_folder() as folder:
        server = PostgresServer(folder, settings)
        server.create()
        server.start()
        try:
            yield server
        finally:
            if server.is_running:
                server.stop()


@contextmanager
def new_folder() -> Iterator[Path]:
    """Yield a folder for a server. The path of a socket in it must be short."""
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as name:
        yield Path(name)


class PostgresServer:
    """A server in a folder, reached by its socket there, and by TCP where it is given a port."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.settings = dict(settings or {})
        if os.geteuid() == 0:
            shutil.chown(folder, _owner())

    @property
    def data(self) -> Path:
        """Where its files are."""
        return self.folder / "data"

    @property
    def is_running(self) -> bool:
        """Whether it has been started and not been stopped."""
        return (self.data / "postmaster.pid").exists()

    def create(self, *options: str) -> None:
        """Make an empty cluster, by more options of initdb's. Everyone who can reach its socket is trusted."""
        words = (*options, "--username", ADMIN, "--auth", "trust", "--no-sync", "--encoding", "UTF8", "--locale", "C")
        self.run("initdb", "--pgdata", str(self.data), *words)

    def create_standby(self, primary: "PostgresServer") -> None:
        """Make a copy of a running server that follows it."""
        address = f"host={primary.folder} user={ADMIN} application_name=standby"
        self.run("pg_basebackup", "--pgdata", str(self.data), "--dbname", address, "--write-recovery-conf", "--no-sync",
                 "--checkpoint", "fast")  # fmt: skip

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = {"listen_addresses": "", "unix_socket_directories": str(self.folder), "fsync": "off"} | self.settings
        options = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
        self.run("pg_ctl", "--pgdata", str(self.data), "--options", options, "--log", str(self.folder / "log"),
                 "--wait", "start")  # fmt: skip

    def stop(self, mode: str = "immediate") -> None:
        """End it; `immediate` is what a crash does, `fast` lets it write what it holds."""
        self.run("pg_ctl", "--pgdata", str(self.data), "--mode", mode, "--wait", "stop")

    def promote(self) -> None:
        """Make a standby the primary."""
        self.run("pg_ctl", "--pgdata", str(self.data), "--wait", "promote")

    def run(self, program: str, *words: str) -> None:
        """Run a program of PostgreSQL's as the server's owner."""
        account: dict[str, Any] = {"user": _owner()} if os.geteuid() == 0 else {}
        binaries = _binaries()
        assert binaries is not None
        command = [f"{binaries}/{program}", *words]
        subprocess.run(command, check=True, cwd=self.folder, stdout=subprocess.DEVNULL, timeout=120, **account)

    def create_database(self, name: str) -> str:
        """Make an empty database and return its URL."""
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def empty(self, url: str) -> bool:
        """Remove all tables of a database, and return whether that was possible at once."""
        import psycopg

        name = url.partition("@/")[2].partition("?")[0]
        try:
            self.execute("SET lock_timeout = '1s'", "DROP SCHEMA public CASCADE", "CREATE SCHEMA public", database=name)
        except psycopg.errors.LockNotAvailable:
            return False
        return True

    def url(self, database: str, user: str = ADMIN) -> str:
        """Return the URL of a database, by the socket."""
        return f"postgresql+psycopg://{user}:secret@/{database}?host={self.folder}"

    def own(self, path: Path) -> None:
        """Give the server a file that others may not read."""
        path.chmod(0o600)
        if os.geteuid() == 0:
            shutil.chown(path, _owner())

    def execute(self, *statements: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run statements as the administrator. Return the rows of the last one, where it has any."""
        import psycopg

        port = self.settings.get("port", "5432")
        address = f"host={self.folder} port={port} user={ADMIN} dbname={database}"
        with psycopg.connect(address, autocommit=True) as connection:
            rows: list[tuple[Any, ...]] = []
            for statement in statements:
                cursor = connection.execute(statement.encode())
                rows = cursor.fetchall() if cursor.description else []
            return rows


class EmptyDatabases:
    """Empty databases of a server. One that was emptied is used again, since making and removing one takes longer."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._numbers = itertools.count()
        self._free: list[str] = []

    def new(self) -> str:
        """Make another one and return its URL."""
        return self._server.create_database(f"test_{next(self._numbers)}")

    @contextmanager
    def one(self) -> Iterator[str]:
        """Yield the URL of one that is emptied afterwards; one that is still in use then is left behind."""
        url = self._free.pop() if self._free else self.new()
        yield url
        if self._server.empty(url):
            self._free.append(url)


def _binaries() -> Path | None:
    """Return the folder of the server's programs."""
    on_path = shutil.which("initdb")
    found = [
        *([str(Path(on_path).resolve().parent)] if on_path else []),
        *sorted(glob.glob("/usr/lib/postgresql/*/bin")),
    ]
    return Path(found[-1]) if found else None


def _owner() -> str:
    known = {user.pw_name for user in pwd.getpwall()}
    return next(name for name in _OWNERS if name in known)

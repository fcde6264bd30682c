"""A bad network between a client and a PostgreSQL server: a proxy that delays, cuts, resets and falls silent."""

import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

CHUNK_BYTES = 65536
RESET = struct.pack("ii", 1, 0)
"""Of SO_LINGER: closing sends a reset."""


class Ending(StrEnum):
    """How a connection ends: in order, by a reset, or never, since nothing is passed on any more."""

    CLOSE = "close"
    RESET = "reset"
    SILENCE = "silence"


class Moment(StrEnum):
    """When it ends: as soon as it is there, in the middle of what the client sends, before a commit is passed on, after
    the server has done it and before the client hears of it, or in the middle of an answer."""

    START = "start"
    STATEMENT = "statement"
    COMMIT = "commit"
    COMMITTED = "committed"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a connection. delays_s: what every piece waits for, at least and at most. bytes_per_s: 0 for no
    bound. pieces: that pass in its direction before it ends in the middle of one."""

    ending: Ending | None = None
    moment: Moment = Moment.START
    delays_s: tuple[float, float] = (0.0, 0.0)
    bytes_per_s: float = 0.0
    pieces: int = 0


WELL = Fault()
Plan = Callable[[], Fault]


class Proxy:
    """Listens on a port of this machine and passes on to a server's socket. `plan` says what happens to the next
    connection, and may be replaced at any time."""

    def __init__(self, server: Path, plan: Plan = lambda: WELL, seed: int = 0) -> None:
        self.plan = plan
        self.endings = 0
        self._server = server
        self._dice = random.Random(seed)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open = set[socket.socket]()
        self._is_closed = False
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, database: str, user: str) -> str:
        """Return the URL of a database behind the proxy."""
        return f"postgresql+psycopg://{user}:secret@127.0.0.1:{self.port}/{database}"

    def close(self) -> None:
        """End all connections."""
        self._is_closed = True
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        """End the connections that are there, silent ones too."""
        for each in tuple(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client, self.plan()), daemon=True).start()

    def _serve(self, client: socket.socket, fault: Fault) -> None:
        with socket.socket(socket.AF_UNIX) as server, client:
            try:
                server.connect(f"{self._server}/.s.PGSQL.5432")
                self._open |= {client, server}
                self._pass_on(client, server, fault)
            except OSError:
                pass  # the server is away, or one side has gone
            finally:
                self._open -= {client, server}

    def _pass_on(self, client: socket.socket, server: socket.socket, fault: Fault) -> None:
        """Pass pieces on until a side closes or the fault's moment has come."""
        left, is_committing = fault.pieces, False
        if fault.ending and fault.moment is Moment.START:
            self._end(client, server, fault.ending)
            return
        while True:
            ready, _, _ = select.select((client, server), (), ())
            source = ready[0]
            piece = source.recv(CHUNK_BYTES)
            if not piece:
                return
            is_asked, target = source is client, server if source is client else client
            is_committing |= is_asked and b"COMMIT" in piece
            moments = {
                Moment.STATEMENT: is_asked and left <= 0,
                Moment.ANSWER: not is_asked and left <= 0,
                Moment.COMMIT: is_asked and is_committing,
                Moment.COMMITTED: not is_asked and is_committing,
            }
            if fault.ending and moments[fault.moment]:
                if fault.moment in (Moment.STATEMENT, Moment.ANSWER):
                    target.sendall(piece[: len(piece) // 2])
                self._end(client, server, fault.ending)
                return
            left -= is_asked is (fault.moment is Moment.STATEMENT)
            self._wait(fault, len(piece))
            target.sendall(piece)

    def _wait(self, fault: Fault, size_bytes: int) -> None:
        slow_s = size_bytes / fault.bytes_per_s if fault.bytes_per_s else 0.0
        time.sleep(self._dice.uniform(*fault.delays_s) + slow_s)

    def _end(self, client: socket.socket, server: socket.socket, ending: Ending) -> None:
        self.endings += 1
        if ending is Ending.SILENCE:
            while client.recv(CHUNK_BYTES):  # until the client, or `cut`, ends it
                pass
        elif ending is Ending.RESET:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


@contextmanager
def running_proxy(server: Path, plan: Plan = lambda: WELL) -> Iterator[Proxy]:
    """Yield a proxy in front of a server in a folder."""
    proxy = Proxy(server, plan)
    try:
        yield proxy
    finally:
        proxy.close()

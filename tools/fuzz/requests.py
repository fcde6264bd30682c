"""Requests to the live page, byte by byte over a socket. `TOKEN` and `HOST` stand for those of the server."""

import logging
import socket
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import UsageError
from tests.support.stores.live_servers import LiveServer, live_server
from tests.support.stores.sample_records import sample_trials, winner

MAX_SECONDS, TRIES = 5.0, 3
"""A busy machine may hold an answer up, so a server hangs only if it does so again and again."""
BUSY = b"503"
_running = ExitStack()


class _NoCompiles:
    """Takes no compile, which lasts seconds and is not what is fuzzed."""

    def prepare(self) -> None:
        """Nothing has to be loaded."""

    def ask(self, *_: Any) -> Any:
        """Refuse."""
        raise UsageError("Nothing is compiled here. Ask a server of `tune ui`.")

    state = cancel = ask


class _Errors(logging.Handler):
    """Keeps what the server logs of its own errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(self.format(record))


@cache
def _server() -> tuple[LiveServer, _Errors]:
    """Return a server that runs until this process ends, and what it logs."""
    errors = _Errors()
    logging.getLogger("uvicorn").addHandler(errors)
    path = Path(tempfile.mkdtemp(prefix="fuzz-")) / "page.db"
    with ResultStore.open(path) as store:
        store.put_all(sample_trials(3), [winner()])
    server = _running.enter_context(live_server(path, what_ifs=_NoCompiles()))
    server.send(f"{server.path}data")  # the first answer loads what draws charts, which takes seconds
    return server, errors


def stop_server() -> None:
    """Stop the server, if it runs: its thread would keep this process from ending."""
    _running.close()
    _server.cache_clear()


def read_request(data: bytes) -> None:
    """Send a request and read how the answer begins.

    Raises:
        AssertionError: the server failed, logged an error, or said nothing for long.
    """
    server, errors = _server()
    errors.records.clear()
    token = server.path.strip("/").encode()
    content = data.replace(b"TOKEN", token).replace(b"HOST", f"127.0.0.1:{server.port}".encode())
    statuses = [_status(server.port, content)]
    while statuses[-1] is None and len(statuses) < TRIES:
        statuses.append(_status(server.port, content))
    status = statuses[-1]
    assert status is not None, "no answer"
    assert not status.startswith(b"5") or status == BUSY, status
    assert not errors.records, errors.records[0]


def _status(port: int, content: bytes) -> bytes | None:
    """Return the status of an answer, empty where the server hangs up on what is no request; None if it says nothing in
    time."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=MAX_SECONDS) as made:
            made.sendall(content)
            made.shutdown(socket.SHUT_WR)
            return made.recv(32).partition(b" ")[2][:3]
    except TimeoutError:
        return None
    except ConnectionError:
        return b""


def request_seeds() -> list[bytes]:
    """Return requests that the page sends."""
    forms = {
        "shape": b'{"device": "h200", "flags": {"seq": 4096, "dim": 64, "causal": true}}',
        "kernels": b'{"device": "h200", "shape": {"batch": 1, "num_heads": 1, "seqlen_q": 64, "head_dim": 64}}',
        "what-if": b'{"device": "h200", "shape": {}, "kernel": "flash_fwd", "parameters": {"block_m": 128}}',
    }
    heads = ["GET /TOKEN/", "GET /TOKEN/data", "GET /TOKEN/overview", "GET /TOKEN/events?seen=0.0", "OPTIONS *"]
    posts = [
        f"POST /TOKEN/{path} HTTP/1.1\r\nHost: HOST\r\nOrigin: http://HOST\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
        for path, body in forms.items()
    ]
    return [f"{head} HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n".encode() for head in heads] + posts

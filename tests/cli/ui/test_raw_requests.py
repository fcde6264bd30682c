"""What a program may send to the server by hand: odd request lines, endless bodies, connections that say nothing."""

import logging
import os
import resource
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from blocktune.cli.ui.guard import MAX_BODY_BYTES
from tests.cli.ui.conftest import filled_store
from tests.support.stores.live_servers import LiveServer, live_server
from tools import python

pytest.importorskip("uvicorn", reason="`tune ui` needs uvicorn")

from blocktune.cli.ui import broadcast, connection


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(filled_store(tmp_path_factory.mktemp("raw") / "search.db")) as running:
        yield running


def opened(server: LiveServer, text: str = "") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    made.sendall(text.encode("latin-1"))
    return made


def answered(server: LiveServer, head: str, body: bytes = b"") -> bytes:
    """The first line of the answer to a request that is sent as it is."""
    host = f"Host: 127.0.0.1:{server.port}\r\n"
    with opened(server, head.format(path=server.path, origin=server.origin).replace("\r\n", "\r\n" + host, 1)) as made:
        with suppress(OSError):  # the server may have hung up already
            made.sendall(body)
        with made.makefile("rb") as answer:
            return answer.readline()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("OPTIONS * HTTP/1.1\r\n\r\n", b"404"),
        ("CONNECT evil:1 HTTP/1.1\r\n\r\n", b"404"),
        ("GET http://127.0.0.1/ HTTP/1.1\r\n\r\n", b"404"),
        ("GET ? HTTP/1.1\r\n\r\n", b"404"),
        ("GET /%00%ff HTTP/1.1\r\n\r\n", b"404"),
        ("BREW {path} HTTP/1.1\r\nOrigin: {origin}\r\n\r\n", b"405"),
        ("\x00\x01\r\n\r\n", b"400"),
    ],
)
def test_odd_request_lines_are_refused_without_a_traceback(
    server: LiveServer, head: str, status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert status in answered(server, head)
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    "length", [f"Content-Length: {400 << 20}", f"Content-Length: {'9' * 30}", "Transfer-Encoding: chunked"]
)
def test_a_body_beyond_its_bound_is_not_kept(server: LiveServer, length: str) -> None:
    head = f"POST {{path}}shape HTTP/1.1\r\nOrigin: {{origin}}\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
    chunk = b"%x\r\n%s\r\n" % (MAX_BODY_BYTES, b"1" * MAX_BODY_BYTES) * 8
    line = answered(server, head, chunk if "chunked" in length else b"1" * 1000)
    assert line == b"" or line.split()[1][:1] == b"4"
    assert server.send(server.path)[0] == 200


def test_connections_that_say_nothing_keep_nobody_out(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 16)
    with ExitStack() as idle:
        for text in ["", "GET / HT"] * 20:
            idle.enter_context(opened(server, text))
        start = time.monotonic()
        assert server.send(server.path)[0] == 200
        assert time.monotonic() - start < 5


MANY = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
kept = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(400)]
print(flush=True)
time.sleep(60)
"""


def test_connections_that_come_at_once_do_not_take_all_files(
    server: LiveServer, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 230, most))
    try:
        with subprocess.Popen([*python(MANY), str(server.port)], stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            client.stdout.readline()
            assert server.send(server.path)[0] == 200
            client.kill()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
    assert "accept" not in caplog.text + capfd.readouterr().err


def test_an_object_with_two_members_of_one_name_is_refused(server: LiveServer) -> None:
    body = b'{"device": "h200", "device": "h100", "flags": {"seq": 1024, "dim": 64}}'
    head = "POST {path}shape HTTP/1.1\r\nOrigin: {origin}\r\nContent-Type: application/json\r\n"
    assert b"400" in answered(server, f"{head}Content-Length: {len(body)}\r\n\r\n", body)


@pytest.mark.parametrize("length", ["Content-Length: 60000", "Transfer-Encoding: chunked"])
def test_a_connection_whose_body_does_not_come_is_closed(
    length: str, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.2)
    head = f"POST {{path}}shape HTTP/1.1\r\nOrigin: {{origin}}\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
    began = time.monotonic()
    assert answered(server, head) == b""
    assert time.monotonic() - began < 5


def test_a_connection_that_sends_no_whole_head_is_closed(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.2)
    with opened(server, "GET / HTTP/1.1\r\nX: ") as slow:
        assert slow.recv(1) == b""


def test_pages_that_follow_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "MAX_STREAMS", 1)
    with live_server(filled_store(tmp_path / "search.db")) as server:
        head = f"GET {server.path}events?seen=0.0 HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n"
        with opened(server, head) as first:
            heard = b""
            while b"retry" not in heard:  # now it follows
                heard += first.recv(1024)
            status, _, body = server.send(f"{server.path}events?seen=0.0")
            assert status == 503
            assert b"Close one" in body


def test_pages_that_come_at_once_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "MAX_STREAMS", 2)
    with live_server(filled_store(tmp_path / "search.db")) as server, ExitStack() as pages:
        head = f"GET {server.path}events?seen=0.0 HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n"
        streams = [pages.enter_context(opened(server, head)) for _ in range(40)]
        heard = [_heard(each) for each in streams]
        assert sum(b"retry: 1000\n" in each for each in heard) == 2


def _heard(stream: socket.socket) -> bytes:
    """What comes until an answer says when to come back, or that there are too many."""
    heard = b""
    while b"retry" not in heard and b"Close one" not in heard:
        heard += stream.recv(1024)
    return heard

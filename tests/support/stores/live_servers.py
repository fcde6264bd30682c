"""A server of `tune ui` on a free port, in a thread of the test, and requests to it."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from blocktune.cli.report.sources import Sources
from blocktune.db.tables.location import StoreTarget

TIMEOUT_S = 60


@dataclass(frozen=True)
class LiveServer:
    """A server that runs. path: first part of every path, with the token."""

    url: str
    port: int

    @property
    def path(self) -> str:
        return self.url.split(f":{self.port}", 1)[1]

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(
        self, path: str, method: str = "GET", body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request as it is given; `path` begins with a slash."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        content = None if body is None else json.dumps(body)
        kind = {} if body is None else {"content-type": "application/json"}
        connection.request(method, path, content, kind | (headers or {}))
        answer = connection.getresponse()
        found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        connection.close()
        return found

    def ask(self, path: str, method: str = "GET", body: Any = None) -> tuple[int, Any]:
        """Send a request as the page does; `path` follows the token."""
        status, _, content = self.send(self.path + path, method, body, {"origin": self.origin})
        return status, json.loads(content)


@contextmanager
def live_server(
    db: Path | str, *, sources: Sources | None = None, poll_seconds: float = 0.1, what_ifs: Any = None
) -> Iterator[LiveServer]:
    """Serve a database, and wait for what the server has begun to prepare: it reads what later tests may replace.
    what_ifs: what makes compiles, a farm of one worker by default."""
    for name in ("altair", "vl_convert", "fastapi", "uvicorn"):
        pytest.importorskip(name, reason=f"`tune ui` needs {name}")
    from blocktune.cli.ui.address import ServerAddress, bound_socket
    from blocktune.cli.ui.server import ServerSettings, make_server
    from blocktune.cli.ui.what_if import WhatIfs
    from blocktune.tuner.compile_server.farm import CompileFarm

    settings = ServerSettings(StoreTarget.of(db), sources or Sources(), poll_seconds=poll_seconds)
    with bound_socket(0) as listening, CompileFarm(workers=1) as farm:
        address = ServerAddress(listening.getsockname()[1])
        server = make_server(settings, what_ifs or WhatIfs(farm), address)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield LiveServer(address.url, address.port)
        finally:
            server.should_exit = True
            preparing = [each for each in threading.enumerate() if each.name == "blocktune-ui"]
            for each in (thread, *preparing):
                each.join(TIMEOUT_S)
                assert not each.is_alive()

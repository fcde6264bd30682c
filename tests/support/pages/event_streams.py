"""Server-sent events as a page gets them, read line by line with a time limit."""

import http.client
import json
import time
from typing import Any

from tests.support.stores.live_servers import LiveServer

TIMEOUT_S = 60


class EventStream:
    """Events of a server from now on.

    last_id: the number of the last event, with which a browser comes back.
    """

    def __init__(self, server: LiveServer, seen: str, sweep: str, *, last_id: str = "") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
        headers = {"last-event-id": last_id} if last_id else {}
        self._connection.request("GET", f"{server.path}events?seen={seen}&sweep={sweep}", headers=headers)
        self._answer = self._connection.getresponse()
        assert self._answer.getheader("content-type", "").startswith("text/event-stream")
        assert self._answer.readline() == b"retry: 1000\n"
        self.last_id = ""

    def next(self, kind: str) -> Any:
        """Return the data of the next event of a kind; others are passed over."""
        return self.each(kind)[kind]

    def each(self, *kinds: str) -> dict[str, Any]:
        """Return the data of the next event of every kind, in whatever order they come."""
        found: dict[str, Any] = {}
        name, deadline = "", time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            field, _, value = self._answer.readline().decode().rstrip("\n").partition(": ")
            if field == "id":
                self.last_id = value
            elif field == "event":
                name = value
            elif field == "data" and name in kinds:
                found.setdefault(name, json.loads(value))
            if len(found) == len(kinds):
                return found
        raise AssertionError(f"of {kinds}, only {list(found)} came within {TIMEOUT_S} s")

    def close(self) -> None:
        """Leave."""
        self._connection.close()

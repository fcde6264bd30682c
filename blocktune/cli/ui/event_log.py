"""Events in order, each with a number: a page that comes late or comes back gets those that it missed."""

import threading
from collections import deque
from typing import Any

from blocktune.cli.report.page import json_text

KEPT = 500
"""Events that a page may be late; one that is later reads everything again."""


class EventLog:
    """Numbers events, and keeps the text of each once for all pages. Any thread may call it.

    Attributes:
        number: of the last event.
    """

    def __init__(self) -> None:
        self.number = 0
        self._entries: deque[tuple[int, str]] = deque(maxlen=KEPT)
        self._lock = threading.Lock()

    def add(self, kind: str, data: Any) -> None:
        """Append an event.

        Args:
            kind: by which a page knows what to do.
            data: plain values.
        """
        text = f"event: {kind}\ndata: {json_text(data)}\n"
        with self._lock:
            self.number += 1
            self._entries.append((self.number, text))

    def forget(self) -> None:
        """Drop the events so far: who has not seen them reads everything again."""
        with self._lock:
            self._entries.clear()

    def after(self, number: int) -> tuple[int, list[str] | None]:
        """Return the number of the last event and the events after a number, None where some of them are gone."""
        with self._lock:
            found = [text for at, text in self._entries if at > number]
            return self.number, found if len(found) == self.number - number else None

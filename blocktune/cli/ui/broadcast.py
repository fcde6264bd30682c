"""Server-sent events: one reading of the database a second for all pages together, and none while no page is open."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

from blocktune.cli.ui.event_log import EventLog
from blocktune.cli.ui.live_store import LiveStore

POLL_SECONDS = 1.0
HEARTBEAT_SECONDS = 15.0
"""After so long without an event a line goes out, by which a server notices that a page has gone."""

MAX_STREAMS = 64
"""Pages that follow events at once; each holds a connection."""

AGAIN = "event: again\ndata: {}\n"
"""Asks a page to read everything again: it has missed too much."""


class Broadcast:
    """Reads what is new while pages follow, and wakes them."""

    def __init__(self, store: LiveStore, poll_seconds: float = POLL_SECONDS) -> None:
        self._store = store
        self._poll_seconds = poll_seconds
        self._followed: Counter[str] = Counter()
        self._changed = asyncio.Condition()
        self._is_ending: Callable[[], bool] = bool

    @property
    def is_full(self) -> bool:
        """Whether no further page can follow."""
        return self._followed.total() >= MAX_STREAMS

    def close_when(self, is_ending: Callable[[], bool]) -> None:
        """Let every page go once this says so: a server waits for them before it ends."""
        self._is_ending = is_ending

    async def run(self) -> None:
        """Read the database again and again while pages are open."""
        while not self._is_ending():
            if self._followed:
                names = [name for name in self._followed if name]
                await asyncio.to_thread(self._store.refresh, names)
            await asyncio.sleep(self._poll_seconds)
            await self._wake()

    async def events(self, name: str, seen: tuple[int, int]) -> AsyncIterator[str]:
        """Yield the text of events for one page while it is open.

        Args:
            name: of the sweep that it follows; empty for none.
            seen: the numbers of the last events that it has, of the store and of the sweep.
        """
        if self.is_full:  # many pages came at once
            yield f"retry: {1000 * HEARTBEAT_SECONDS:.0f}\n\n"
            return
        self._followed[name] += 1
        try:
            logs = [self._store.log, await asyncio.to_thread(self._store.log_of, name)]
            numbers = [min(number, log.number) for number, log in zip(seen, logs, strict=True)]
            yield "retry: 1000\n\n"
            while not self._is_ending():
                numbers, texts = _missed_events(logs, numbers)
                for text in texts or [": nothing new\n"]:
                    yield f"id: {numbers[0]}.{numbers[1]}\n{text}\n"
                await self._wait(logs, numbers)
        finally:
            self._followed[name] -= 1
            self._followed += Counter()  # without those that no page follows

    async def _wait(self, logs: list[EventLog], numbers: list[int]) -> None:
        """Wait for an event, or for the time of a heartbeat."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_SECONDS), self._changed:
                await self._changed.wait_for(
                    lambda: self._is_ending() or [log.number for log in logs] != numbers,
                )

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _missed_events(logs: list[EventLog], numbers: list[int]) -> tuple[list[int], list[str]]:
    """Return the numbers of the last events and the events after these numbers, the store's first."""
    found = [log.after(number) for log, number in zip(logs, numbers, strict=True)]
    texts = [part for _, part in found if part is not None]
    now = [number for number, _ in found]
    return now, [AGAIN] if len(texts) < len(found) else [text for part in texts for text in part]

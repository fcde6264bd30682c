"""Connections that cannot hold the server up: few at once, and none that sends no whole request for long."""

import asyncio
import time
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 160
"""A browser opens about six for a page; each takes a file of the process."""

IDLE_SECONDS = 5.0
"""How long a connection may take for a request. It is looked at as often."""

MAX_ACCEPTED = 16
"""Connections that are accepted at once, before those that are too many are closed: there are 256 files at least."""


class BoundedConnection(H11Protocol):  # type: ignore[misc]
    """A connection that is closed if no whole request comes in time.

    Where there are too many, the one that has waited longest makes room. One whose request is being answered stays, as
    streams of events do: `MAX_STREAMS` bounds those.
    """

    _look: asyncio.TimerHandle | None = None
    _answered: object = None
    """The last request that the connection was seen with."""
    _waits_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or the place of one that waits."""
        super().connection_made(cast(asyncio.Transport, transport))
        self._waits_since = time.monotonic()
        if len(self.connections) > MAX_CONNECTIONS:
            waiting = [one for one in self.connections if isinstance(one, BoundedConnection) and one.is_waiting]
            min(waiting, key=lambda one: one._waits_since, default=self).transport.close()
        self._look = self.loop.call_later(IDLE_SECONDS, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    @property
    def is_waiting(self) -> bool:
        """Whether no whole request is being answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _close_if_idle(self) -> None:
        """Close a connection that has waited since it was looked at last."""
        if self.is_waiting and self.cycle is self._answered:
            self.transport.close()
            return
        self._answered, self._waits_since = self.cycle, time.monotonic()
        self._look = self.loop.call_later(IDLE_SECONDS, self._close_if_idle)

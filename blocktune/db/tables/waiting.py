"""How long a server is waited for, and what is said meanwhile."""

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

logger = logging.getLogger("blocktune")

CONNECT_SECONDS, LEAST_CONNECT_SECONDS = 10, 5
"""How long a server may take to answer at all; one that accepts and is silent would keep a command waiting for ever.
Who waits less for a lock waits less for this too, but a slow line takes seconds."""

WARNING_SECONDS = 5.0
"""How long a wait is before there is a warning of it."""

BUSY = re.compile(
    "too many clients|too many connections|remaining connection slots|no more connections|starting up|shutting down"
)
"""What a server says that is there and takes no connection for the moment; drivers have no code for it."""


def connect_seconds(patience_seconds: float) -> int:
    """Return how long a connection is tried by who waits so long for a lock."""
    return min(CONNECT_SECONDS, max(LEAST_CONNECT_SECONDS, math.ceil(patience_seconds)))


@contextmanager
def slow_answer_warning(label: str, patience_seconds: float) -> Iterator[None]:
    """Warn of a long wait for a store: what it may be for, and until when."""
    text = (
        "%s has not answered for %.0f s: it is at work, waits for another process, is full, or cannot be reached. It "
        "is given up after %.0f s without an answer."
    )
    longest_seconds = max(patience_seconds, connect_seconds(patience_seconds))
    timer = Timer(WARNING_SECONDS, logger.warning, (text, label, WARNING_SECONDS, longest_seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

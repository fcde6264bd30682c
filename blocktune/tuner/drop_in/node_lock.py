"""One process of a machine tunes a call; the others wait for what it finds, for a bounded time."""

import contextlib
import hashlib
import logging
from collections.abc import Iterator

from blocktune.runtime.autotuned.boundary import tolerance
from blocktune.tuner.measure.lock_file import Patience, acquire_lock, open_lock_file

logger = logging.getLogger("blocktune")


@contextlib.contextmanager
def node_lock(name: str, kernel: str, patience: Patience) -> Iterator[bool]:
    """Hold the lock of a name among this user's processes; gives False if another one holds it for too long.

    The lock is a file that the operating system releases when a process ends, however it ends. Where no such file can
    be made or locked, every process tunes for itself.

    Args:
        name: what is tuned.
        kernel: of which, for messages.
        patience: how long to wait.
    """

    def tell(holder: str) -> None:
        logger.warning("%s: waiting for %s, which tunes it, for at most %.0f s.", kernel, holder, patience.left_seconds)

    is_free = True
    with contextlib.ExitStack() as stack:
        with tolerance(kernel, "a lock against other processes that tune it"):
            file = stack.enter_context(open_lock_file(f"tune-{hashlib.sha256(name.encode()).hexdigest()[:16]}"))
            is_free = acquire_lock(file, patience, tell)
        yield is_free

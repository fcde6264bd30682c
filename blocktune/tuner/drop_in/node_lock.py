"""One process of a machine tunes a call; the others wait for what it finds, for a bounded time."""

import contextlib
import hashlib
import logging
from collections.abc import Iterator

from blocktune.runtime.autotuned.boundary import tolerance
from blocktune.tuner.measure.lock_file import Deadline, acquire_lock, open_lock_file

logger = logging.getLogger("blocktune")


@contextlib.contextmanager
def node_lock(name: str, kernel: str, deadline: Deadline) -> Iterator[bool]:
    """Hold the lock of a name among this user's processes; gives False if another one still holds it at the deadline.

    The lock is a file that the operating system releases when a process ends, however it ends. Where no such file can
    be made or locked, every process tunes for itself.

    Args:
        name: what is tuned.
        kernel: of which, for messages.
        deadline: when to stop waiting.
    """

    def tell(holder: str) -> None:
        logger.warning("%s: waiting for %s to tune it, for %.0f s more.", kernel, holder, deadline.left_seconds)

    is_free = True
    with contextlib.ExitStack() as stack:
        with tolerance(kernel, "a lock against other processes that tune it"):
            file = stack.enter_context(open_lock_file(f"tune-{hashlib.sha256(name.encode()).hexdigest()[:16]}"))
            is_free = acquire_lock(file, deadline, tell)
        yield is_free

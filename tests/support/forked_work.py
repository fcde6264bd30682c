"""Work in a process that is forked from this one, which shares what is imported."""

import os
import traceback
from collections.abc import Callable


def forked(work: Callable[[], None]) -> int:
    """Start work in a process of its own, and return its number; it ends with 1 where the work raises."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child

"""Triton's key of itself, which a thread finds ahead of the first launch.

Triton puts a hash of all of its files into the key of everything that it compiles: a third of a second in the first
call of a process. Other Python code runs meanwhile.
"""

import threading
from contextlib import suppress

_finding: threading.Thread | None = None


def begin_triton_key() -> None:
    """Begin to find the key, once in a process."""
    global _finding
    if _finding is None:
        _finding = threading.Thread(target=_find, name="blocktune-triton-key", daemon=True)
        with suppress(RuntimeError):  # no more threads: Triton finds it itself
            _finding.start()


def await_triton_key() -> None:
    """Wait for the key if that has begun: Triton would find it a second time."""
    if _finding is not None and _finding.is_alive():
        _finding.join()


def _find() -> None:
    with suppress(Exception):  # what Triton compiles next raises the same
        from triton.runtime.cache import triton_key

        triton_key()

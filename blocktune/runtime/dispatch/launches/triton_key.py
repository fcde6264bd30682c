"""Triton's key of itself, which a thread finds ahead of the first launch, and which later processes remember.

Triton puts a hash of all of its files, 400 MB, into the key of everything that it compiles: a third of a second in the
first call of a process. The key stands in Triton's cache next to the state of these files. A process that finds the
same state takes it from there; otherwise Triton hashes while other Python code runs.
"""

import hashlib
import json
import os
import threading
from contextlib import suppress
from pathlib import Path

from blocktune.kernels.files.file_path import replace_file
from blocktune.kernels.files.reading import KEY_BYTES, read_json

FILE = "blocktune-triton-key.json"
"""In Triton's cache: the state of its files, and their key."""
HASHED = ("_C", "backends", "compiler", "language", "runtime")
"""The folders of Triton that its key depends on."""

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
        from triton import knobs
        from triton.runtime import cache

        state, file = _state_of_triton(Path(cache.__file__).parents[1]), Path(knobs.cache.dir) / FILE
        key = _remembered(file, state)
        if key is None:
            key = cache.triton_key()
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, json.dumps({"state": state, "key": key}).encode())
        else:
            cache.triton_key = lambda: key


def _remembered(file: Path, state: str) -> str | None:
    """Return the key of Triton's files in this state, or None."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = read_json(file, KEY_BYTES)
        if kept["state"] == state and isinstance(kept["key"], str):
            return str(kept["key"])
    return None


def _state_of_triton(root: Path) -> str:
    """Return a hash of name, size and times of all that Triton hashes. Whoever writes a file changes its `st_ctime`,
    whatever time they give it."""
    found = []
    for folder in HASHED:
        for parent, _, names in os.walk(root / folder, followlinks=True):
            for name in names:
                if name.endswith((".py", ".so")):
                    state = os.stat(os.path.join(parent, name))
                    found.append((parent, name, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()

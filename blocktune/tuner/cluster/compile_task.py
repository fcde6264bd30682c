"""The Ray task for idle processors: a task that compiles configs of a job. Its code goes into a node's caches.

Nothing here knows the store, whose library would take longer to load than all of this.
"""

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.compile.cache import ResourceCache
from blocktune.tuner.compile.child_process import Child, ChildTimeoutError
from blocktune.tuner.compile.shipped_code import KERNELS, ShippedCode, packed_code, unpack_code

COMPILE_SECONDS = 1200.0
"""A task that takes longer is given up; the farm bounds each compile."""

LISTEN_SECONDS = 1.0

FETCH_SECONDS = 20.0
"""What a job waits for code at most that is ready on another node."""


def compile_part(asked: Mapping[str, Any], command: Sequence[str] | None) -> ShippedCode:
    """Return the code of some configs of a job; a Ray task.

    Args:
        asked: what the process gets, without the folder.
        command: starts the process; None is `ahead_command()`.

    Raises:
        ChildLostError: the process gave no answer.
    """
    with tempfile.TemporaryDirectory(prefix="blocktune-") as folder:
        child = Child(command or ahead_command(), os.environ | {"TRITON_CACHE_DIR": f"{folder}/{KERNELS}"})
        try:
            child.send({**asked, "folder": folder})
            _await_answer(child)
        finally:
            child.end()
        return packed_code(Path(folder))


def _await_answer(child: Child) -> None:
    """Wait for the process, in turns: Ray's cancel is seen between two of them."""
    deadline = time.monotonic() + COMPILE_SECONDS
    while True:
        try:
            child.receive(LISTEN_SECONDS)
            return
        except ChildTimeoutError:
            if time.monotonic() >= deadline:
                raise


def take_in(results: Sequence[Any]) -> str:
    """Add the code of compile tasks to the caches of this node.

    Returns:
        Why some could not be added; empty where all were.
    """
    import ray
    from ray.exceptions import RayError

    problems, deadline = [], time.monotonic() + FETCH_SECONDS
    for result in results:
        try:
            code = ray.get(result, timeout=max(0.0, deadline - time.monotonic()))
            if code.kernels:
                unpack_code(code, _triton_cache(), ResourceCache().folder)
        except (RayError, OSError, UsageError) as error:
            problems.append((str(error).splitlines() or [repr(error)])[-1])
    return "; ".join(dict.fromkeys(problems))


def ahead_command() -> tuple[str, ...]:
    """Return what starts the process that compiles ahead, as a child of this one."""
    return (sys.executable, "-P", "-m", "blocktune.tuner.fleet.ahead_worker", str(os.getpid()))


def _triton_cache() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)

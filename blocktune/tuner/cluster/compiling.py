"""Compiling ahead on a cluster: tasks that need a processor and no GPU, for the jobs that begin next.

A task compiles some of the configs that a search is expected to try, on any node that has an idle processor, and its
result is the code. When the job begins, its node takes into its own caches what is done by then, and the search finds
it compiled. No job waits for such a task, and one that fails costs only time: what has no code, the job compiles.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.cluster.connection import kinds_in, spare_processors
from blocktune.tuner.cluster.task_record import TaskRecord
from blocktune.tuner.compile.cache import ResourceCache
from blocktune.tuner.compile.child_process import Child, ChildTimeoutError
from blocktune.tuner.compile.shipped_code import KERNELS, ShippedCode, packed_code, unpack_code
from blocktune.tuner.fleet.job import Job

CONFIGS_AHEAD = 48
"""Configs of a job that are compiled before it begins. The search proposes the others when it has measured some."""

CONFIGS_A_TASK = 8

JOBS_AHEAD = 2
"""Jobs that are compiled ahead for each GPU. More would fill the object stores with code that waits."""

COMPILE_SECONDS = 1200.0
"""A task that takes longer is given up; the farm bounds each compile."""

LISTEN_SECONDS = 1.0

FETCH_SECONDS = 20.0
"""What a job waits for code at most that is ready on another node."""


class CodeAhead:
    """The compile tasks of one run, seen from its driver.

    Args:
        command: starts the process that compiles; None is `ahead_command()`.
    """

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._command = command
        self._tasks: dict[int, list[Any]] = {}
        self._pending: set[Any] = set()

    def keep_up(self, records: Iterable[TaskRecord], nodes: Sequence[Mapping[str, Any]]) -> None:
        """Have the jobs that begin next compiled, as far as processors are idle.

        Args:
            records: the jobs without an end, in the order in which they begin.
            nodes: what `ray.nodes()` says.
        """
        left = spare_processors(nodes) - len(self._unfinished())
        for record in next_to_begin(records, kinds_in(nodes)):
            if left <= 0:
                return
            if record.number not in self._tasks:
                self._tasks[record.number] = self._submitted(record.job)
                left -= len(self._tasks[record.number])

    def ready_for(self, record: TaskRecord) -> list[Any]:
        """Return the results that a job finds now that it begins, and give up the tasks that are not done."""
        import ray

        tasks = self._tasks.get(record.number, [])
        unfinished = self._unfinished().intersection(tasks)
        for task in unfinished:
            ray.cancel(task)
        self._pending -= unfinished
        self._tasks[record.number] = [task for task in tasks if task not in unfinished]
        return self._tasks[record.number]

    def forget(self, record: TaskRecord) -> None:
        """Free the code of a job that has its end."""
        self.ready_for(record)
        del self._tasks[record.number]

    def end(self) -> None:
        """Give up all tasks; harmless when repeated."""
        import ray

        for task in self._pending:
            ray.cancel(task)
        self._pending.clear()
        self._tasks.clear()

    def _submitted(self, job: Job) -> list[Any]:
        import ray

        most = min(job.budget.trials or CONFIGS_AHEAD, CONFIGS_AHEAD)
        parts = -(-most // CONFIGS_A_TASK)
        task = ray.remote(num_cpus=1, max_retries=0)(compile_part)  # the job compiles what a lost task has not
        asked = {"job": job.to_json(), "most": most, "parts": parts}
        named = task.options(name=f"compile {job.shape.label}")
        tasks = [named.remote(asked | {"part": part}, self._command) for part in range(parts)]
        self._pending.update(tasks)
        return tasks

    def _unfinished(self) -> set[Any]:
        """Return the tasks that run or wait. Their results stay where they are."""
        import ray

        if self._pending:
            pending = list(self._pending)
            self._pending = set(ray.wait(pending, num_returns=len(pending), timeout=0, fetch_local=False)[1])
        return self._pending


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


def next_to_begin(records: Iterable[TaskRecord], gpus: Mapping[str, int]) -> list[TaskRecord]:
    """Return the jobs that begin next, without those for which a GPU is idle: they begin at once."""
    idle = dict(gpus)
    waiting: dict[str, list[TaskRecord]] = {kind: [] for kind in gpus}
    for record in records:
        kind = record.job.device
        if kind not in gpus:
            continue
        if record.attempt:
            idle[kind] -= 1
        else:
            waiting[kind].append(record)
    chosen = [
        record for kind, found in waiting.items() for record in found[max(0, idle[kind]) :][: JOBS_AHEAD * gpus[kind]]
    ]
    return sorted(chosen, key=lambda record: record.number)

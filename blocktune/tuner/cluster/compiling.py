"""Compiling ahead on a cluster: tasks that need a processor and no GPU, for the jobs that begin next.

A task compiles some of the configs that a search is expected to try, on any node that has an idle processor, and its
result is the code. When the job begins, its node takes into its own caches what is done by then, and the search finds
it compiled. No job waits for such a task, and one that fails costs only time: what has no code, the job compiles.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blocktune.tuner.cluster.compile_task import compile_part
from blocktune.tuner.cluster.connection import kinds_in, spare_processors
from blocktune.tuner.cluster.task_record import TaskRecord
from blocktune.tuner.fleet.job import Job

CONFIGS_AHEAD = 48
"""Configs of a job that are compiled before it begins. The search proposes the others when it has measured some."""

CONFIGS_A_TASK = 8

JOBS_AHEAD = 2
"""Jobs that are compiled ahead for each GPU. More would fill the object stores with code that waits."""


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
        left = spare_processors(nodes) - len(self._pending_tasks())
        for record in next_to_begin(records, kinds_in(nodes)):
            if left <= 0:
                return
            if record.number not in self._tasks:
                self._tasks[record.number] = self._submit_parts(record.job)
                left -= len(self._tasks[record.number])

    def ready_for(self, record: TaskRecord) -> list[Any]:
        """Return the results that a job finds now that it begins, and give up the tasks that are not done."""
        import ray

        tasks = self._tasks.get(record.number, [])
        unfinished = self._pending_tasks().intersection(tasks)
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

    def _submit_parts(self, job: Job) -> list[Any]:
        import ray

        most = min(job.budget.trials or CONFIGS_AHEAD, CONFIGS_AHEAD)
        parts = -(-most // CONFIGS_A_TASK)
        task = ray.remote(num_cpus=1, max_retries=0)(compile_part)  # the job compiles what a lost task has not
        asked = {"job": job.to_json(), "most": most, "parts": parts}
        named = task.options(name=f"compile {job.shape.label}")
        tasks = [named.remote(asked | {"part": part}, self._command) for part in range(parts)]
        self._pending.update(tasks)
        return tasks

    def _pending_tasks(self) -> set[Any]:
        """Return the tasks that run or wait. Their results stay where they are."""
        import ray

        if self._pending:
            pending = list(self._pending)
            self._pending = set(ray.wait(pending, num_returns=len(pending), timeout=0, fetch_local=False)[1])
        return self._pending


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

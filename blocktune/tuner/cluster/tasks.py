"""The calls of Ray that a run makes: submit, listen, order, cancel."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blocktune.kernels.values.errors import BlocktuneError
from blocktune.tuner.cluster.connection import kind_resource, kinds_in
from blocktune.tuner.cluster.task_record import TaskRecord
from blocktune.tuner.cluster.worker import Desk, Message, WorkerDiedError, make

MAX_RETRIES = 4
"""Attempts after the first one. Each config that kills its worker costs one."""

MAX_CALLS_IN_FLIGHT = 10_000
"""Tasks that may talk to the driver at once."""


class ClusterLostError(BlocktuneError):
    """The cluster was lost while jobs were made."""


def _cluster_lost_error(error: Exception) -> ClusterLostError:
    return ClusterLostError(
        f"The Ray cluster was lost during the run: {str(error).splitlines()[0]}. "
        "All trials are kept; the same command continues the run."
    )


class Cluster:
    """The nodes as Ray knows them now."""

    @property
    def nodes(self) -> list[Mapping[str, Any]]:
        """What Ray says of them.

        Raises:
            ClusterLostError: the cluster is gone.
        """
        import ray
        from ray.exceptions import RayError

        try:
            return list(ray.nodes())
        except RayError as error:
            raise _cluster_lost_error(error) from error

    def gpus_of(self, kind: str) -> int:
        """Return how many GPUs of a kind there are."""
        return kinds_in(self.nodes).get(kind, 0)

    def has_node_for(self, record: TaskRecord) -> bool:
        """Return whether a node has the kind of GPU and has not refused the job."""
        left = [node for node in self.nodes if node["NodeID"] not in record.refused]
        return record.job.device in kinds_in(left)


class RayTasks:
    """The tasks of one run.

    Args:
        command: starts a worker on a node; None is `worker_command()`.
        silence_seconds: how long a worker may say nothing.
    """

    def __init__(self, command: Sequence[str] | None, silence_seconds: float) -> None:
        self.cluster = Cluster()
        self._command = command
        self._silence_seconds = silence_seconds
        self._desk: Any = None
        self._make: Any = None
        self._refs: set[Any] = set()

    def begin(self) -> None:
        """Set the desk up on the driver's node, so that it lives as long as the driver."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_concurrency": MAX_CALLS_IN_FLIGHT, "scheduling_strategy": here}
        self._desk = ray.remote(Desk).options(**options).remote()
        # max_calls=0: the process and its worker stay for the next job
        self._make = ray.remote(
            num_cpus=0, num_gpus=1, max_calls=0, max_retries=MAX_RETRIES, retry_exceptions=[WorkerDiedError]
        )(make)

    def submit(self, record: TaskRecord) -> None:
        """Give a job to Ray."""
        options: dict[str, Any] = {"name": record.job.shape.label, "resources": {kind_resource(record.job.device): 1}}
        if record.refused:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(record.refused))})"}
        task = self._make.options(**options)
        record.ref = task.remote(self._desk, record.number, self._command, self._silence_seconds)
        self._refs.add(record.ref)

    def ended_tasks(self, records: Iterable[TaskRecord]) -> list[TaskRecord]:
        """Return those whose tasks ended."""
        import ray

        by_ref = {record.ref: record for record in records}
        done, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0)
        return [by_ref[ref] for ref in done]

    def result(self, record: TaskRecord) -> Message:
        """Return how a task ended; {"lost": reason} for one without an end."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        self._refs.discard(record.ref)
        try:
            end: Message = ray.get(record.ref)
        except WorkerDiedError as error:
            return {"lost": f"{record.losses} workers died of it, the last one: {record.reason or error}"}
        except RayTaskError as error:
            return {"lost": f"its task failed: {error.cause!r}"}
        except RayError as error:
            return {"lost": f"{record.losses + 1} workers died of it, the last one: {str(error).splitlines()[0]}"}
        return end

    def has_more_attempts(self, record: TaskRecord) -> bool:
        """Return whether Ray tries a job again that was lost."""
        return record.losses <= MAX_RETRIES

    def hear(self, timeout_s: float) -> list[tuple[str, Message]]:
        """Return what tasks have said.

        Raises:
            ClusterLostError: the cluster is gone.
        """
        import ray
        from ray.exceptions import RayError

        try:
            heard: list[tuple[str, Message]] = ray.get(self._desk.hear.remote(timeout_s))
        except RayError as error:
            raise _cluster_lost_error(error) from error
        return heard

    def order(self, attempt: str, order: Message) -> None:
        """Give an order to an attempt."""
        self._desk.order.remote(attempt, order)

    def cancel(self, record: TaskRecord) -> None:
        """End a task at once, whether it runs or waits; Ray does not try it again."""
        import ray

        self._refs.discard(record.ref)
        ray.cancel(record.ref, force=True)

    def end(self) -> None:
        """End all tasks and the desk; harmless when repeated."""
        import ray

        for ref in self._refs:
            ray.cancel(ref, force=True)
        self._refs.clear()
        if self._desk is not None:
            with contextlib.suppress(ValueError):  # Ray has ended
                ray.kill(self._desk)
            self._desk = None

"""The Ray task of a job: a task with one GPU, and the desk through which tasks and the driver talk.

A task starts the same worker process as on one host (`tuner/fleet/worker.py`) and keeps it for the next job that Ray
gives to this process. While that starts, the task says on the desk that it begins, and waits for the job as it stands
by then, with the code that was compiled ahead. All that the worker says goes to the desk; the end is the task's result.
"""

import asyncio
import os
import signal
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blocktune.kernels.files.variables import PROCESSORS
from blocktune.tuner.cluster.compile_task import take_in
from blocktune.tuner.cluster.connection import processors_of
from blocktune.tuner.compile.child_process import Child, ChildLostError, ChildTimeoutError

LISTEN_SECONDS = 1.0
"""How often a task looks for orders while its worker is silent."""

START_SECONDS = 180.0
"""What a worker has at least for its first word of a job: it may have to start, and to build its tensors."""

Message = dict[str, Any]


class WorkerDiedError(Exception):
    """The worker process died or was silent for too long; Ray tries the job again."""


class Desk:
    """Messages of tasks to the driver, and the driver's orders; an asynchronous actor."""

    def __init__(self) -> None:
        self._heard: asyncio.Queue[tuple[str, Message]] = asyncio.Queue()
        self._orders: defaultdict[str, asyncio.Queue[Message]] = defaultdict(asyncio.Queue)

    async def tell(self, attempt: str, message: Message | None) -> Message | None:
        """Pass a message on to the driver. Returns an order for this attempt, if there is one."""
        if message is not None:
            self._heard.put_nowait((attempt, message))
        orders = self._orders[attempt]
        return None if orders.empty() else orders.get_nowait()

    async def first_order(self, attempt: str) -> Message:
        """Return the first order for an attempt, once it is given."""
        return await self._orders[attempt].get()

    async def order(self, attempt: str, order: Message) -> None:
        """Give an order to an attempt."""
        self._orders[attempt].put_nowait(order)

    async def hear(self, timeout_s: float) -> list[tuple[str, Message]]:
        """Return what was said, once there is anything or the time is over."""
        try:
            messages = [await asyncio.wait_for(self._heard.get(), timeout_s)]
        except TimeoutError:
            return []
        while not self._heard.empty():
            messages.append(self._heard.get_nowait())
        return messages


@dataclass
class _Kept:
    """The worker process that this Ray process keeps between jobs, and what it was started for."""

    child: Child | None = None
    started_as: object = None

    def for_gpu(self, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Return the process for this GPU and these processors."""
        wanted = (tuple(command), dict(environment))
        if self.child is not None and self.started_as == wanted:
            return self.child
        self.end()
        self.child, self.started_as = Child(command, os.environ | environment), wanted
        return self.child

    def end(self) -> None:
        if self.child is not None:
            self.child.end()
            self.child = None


_kept = _Kept()


def make(desk: Any, number: int, command: Sequence[str] | None, silence_seconds: float) -> Message:
    """Make a job on the GPU that Ray gave to this task.

    Args:
        desk: where to talk to the driver.
        number: of the job.
        command: starts a worker; None is `worker_command()`.
        silence_seconds: how long a worker may say nothing before it counts as hung.

    Raises:
        WorkerDiedError: the worker gave no end.
    """
    import ray

    attempt, place = uuid.uuid4().hex, _place()
    try:
        child = _kept.for_gpu(command or _command(), _environment(place["node"]))  # starts while the driver answers
        ray.get(desk.tell.remote(attempt, {"began": number} | place))
        order = ray.get(desk.first_order.remote(attempt))
        if "job" not in order:
            return {"dropped": True}
        if problem := take_in(order["code"]):
            ray.get(desk.tell.remote(attempt, {"remark": f"code that was compiled ahead is not used: {problem}"}))
        child.send(order["job"])
        return _listen(child, desk, attempt, silence_seconds)
    except ChildLostError as error:
        _kept.end()
        ray.get(desk.tell.remote(attempt, {"died": str(error)}))
        raise WorkerDiedError(str(error)) from None
    except BaseException:
        _kept.end()  # it may be in the middle of a job
        raise


def _listen(child: Child, desk: Any, attempt: str, silence_seconds: float) -> Message:
    """Pass on what the worker says until it says how the job ended, and the driver's order to stop."""
    import ray

    deadline = time.monotonic() + max(START_SECONDS, silence_seconds)
    while True:
        answer = None
        try:
            answer = child.receive(min(LISTEN_SECONDS, silence_seconds))
            deadline = time.monotonic() + silence_seconds
        except ChildTimeoutError:
            if time.monotonic() >= deadline:
                raise ChildTimeoutError(f"silent for {silence_seconds:.0f} s") from None
        if answer is not None and not answer.keys() & {"progress", "records"}:
            return answer
        order = ray.get(desk.tell.remote(attempt, answer))
        if order is not None:
            child.send_signal(signal.SIGINT)


def _command() -> tuple[str, ...]:
    from blocktune.tuner.fleet.local_executor import worker_command

    return worker_command()


def _environment(node_id: str) -> dict[str, str]:
    """Return what the worker gets besides this process's environment, where Ray has named the GPU."""
    import ray

    processors = str(processors_of(ray.nodes(), node_id))
    return {PROCESSORS.name: processors, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")}


def _place() -> dict[str, str]:
    """Return where this task runs: the node's id, and what people call the place."""
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    gpus = ",".join(map(str, ray.get_gpu_ids()))
    return {"node": node_id, "worker": f"{socket.gethostname()} {node_id[:4]} GPU {gpus}"}

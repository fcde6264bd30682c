"""One worker process for each local GPU, with a common list of jobs.

    executor = LocalExecutor(alike_devices(spec))
    for event in executor.run(jobs):
        print(event)

A worker sees one GPU only and an equal part of the processors. Whoever is idle takes the longest job that waits, so
that no GPU is left with a long one at the end.
"""

import os
import queue
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from blocktune.kernels.files.variables import PROCESSORS
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.nvml import canonical_uuid
from blocktune.tuner.compile.child_process import Child, ChildDiedError, ChildTimeoutError
from blocktune.tuner.compile_server.farm import processors
from blocktune.tuner.fleet.job import Advanced, Event, Failed, Finished, Job, Started, WorkerLost, progress_from

MAX_TAKEOVERS = 2
"""A job that cost three workers is to blame itself."""

MAX_LOSSES_IN_A_ROW = 3
"""A worker that died of this many different jobs, and finished none between, is to blame itself."""

SILENCE_SECONDS = 1800.0
"""A worker reports its progress twice per second while it searches; finals and stages of a config end sooner."""

INTERRUPT_SECONDS = 20.0
"""What workers have to end early and tell what they found; trials are kept in any case."""

Tell = Callable[[Event], None]


def worker_command() -> tuple[str, ...]:
    """Return what starts a worker of this process. -P keeps the working directory off the import path, as for the
    worker that measures."""
    return (sys.executable, "-P", "-m", "blocktune.tuner.fleet.worker", str(os.getpid()))


class LocalExecutor:
    """An `Executor` on GPUs of this host, for one run.

    Args:
        devices: the GPUs, alike and each with its UUID.
        names: what each is called in events; None numbers them.
        command: starts a worker; None is `worker_command()`.
        interrupt_seconds: what interrupted workers have before they are killed.
    """

    def __init__(
        self,
        devices: Sequence[DeviceSpec],
        *,
        names: Sequence[str] | None = None,
        command: Sequence[str] | None = None,
        interrupt_seconds: float = INTERRUPT_SECONDS,
    ) -> None:
        share = max(1, int(processors()) // len(devices))
        called = names or [f"GPU {number}" for number in range(len(devices))]
        self._workers = [
            _Worker(name, command or worker_command(), _environment(device, share))
            for name, device in zip(called, devices, strict=True)
        ]
        self._interrupt_seconds = interrupt_seconds
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    def run(self, jobs: Sequence[Job]) -> Iterator[Event]:
        pool = ThreadPoolExecutor(len(self._workers), thread_name_prefix="blocktune-gpu")
        try:
            yield from self._drive(_Schedule(jobs, self._workers, lambda worker, job: self._begin(pool, worker, job)))
        finally:
            for worker in self._workers:
                worker.stop(signal.SIGKILL)
            pool.shutdown()  # last of all: Linux ends a worker with the thread that started it
            for worker in self._workers:
                worker.close()

    def interrupt(self) -> None:
        self._events.put(None)  # of all that could be done here, this is safe within a signal handler

    def _begin(self, pool: ThreadPoolExecutor, worker: "_Worker", job: Job) -> None:
        pool.submit(worker.make, job, self._events.put)

    def _drive(self, schedule: "_Schedule") -> Iterator[Event]:
        """Hand out jobs and pass on what is heard, until nothing runs and nothing waits."""
        yield from schedule.hand_out()
        deadline: float | None = None
        while schedule.running:
            try:
                event = self._events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:  # they do not end by themselves
                for worker in schedule.running.values():
                    worker.stop(signal.SIGKILL)
                deadline = None
                continue
            if event is None:
                deadline = time.monotonic() + self._interrupt_seconds
                schedule.drop()
                for worker in schedule.running.values():
                    worker.stop(signal.SIGINT)
                continue
            yield from schedule.heard(event)


class _Schedule:
    """Which job waits, which runs where, and which worker may have which."""

    def __init__(self, jobs: Sequence[Job], workers: "Sequence[_Worker]", begin: "Callable[[_Worker, Job], None]"):
        self.running: dict[Job, _Worker] = {}
        self._waiting = sorted(jobs, key=lambda job: job.size, reverse=True)
        self._idle = list(workers)
        self._begin = begin
        self._lost: defaultdict[Job, list[str]] = defaultdict(list)
        self._dropped = False

    def hand_out(self) -> Iterator[Event]:
        """Give idle workers what they may have; if there is no worker left, all that waits has failed."""
        for worker in list(self._idle):
            job = next((job for job in self._waiting if self._may_have(worker, job)), None)
            if job is not None:
                self._waiting.remove(job)
                self._idle.remove(worker)
                self.running[job] = worker
                self._begin(worker, job)
        if not self._idle and not self.running:
            left, self._waiting = self._waiting, []
            for job in left:
                yield Failed(job, "Every worker died of several jobs in a row; see above.", 1)

    def heard(self, event: Event) -> Iterator[Event]:
        """Pass on an event of a running job and do what follows from it."""
        if isinstance(event, (Started, Advanced)):
            yield event
            return
        worker = self.running.pop(event.job)
        if isinstance(event, WorkerLost):
            yield from self._handle_loss(worker, event)
        else:
            worker.losses.clear()
            self._idle.append(worker)
            yield event
        yield from self.hand_out()

    def drop(self) -> None:
        """Begin nothing any more."""
        self._waiting, self._dropped = [], True

    def _handle_loss(self, worker: "_Worker", event: WorkerLost) -> Iterator[Event]:
        job = event.job
        if self._dropped:
            yield Failed(job, "interrupted before anything was found", 130)
            return
        self._lost[job].append(worker.name)
        worker.losses.add(job)
        retired = len(worker.losses) >= MAX_LOSSES_IN_A_ROW
        if not retired:
            self._idle.append(worker)
        if len(self._lost[job]) > MAX_TAKEOVERS:
            yield Failed(job, f"{len(self._lost[job])} workers died of it, the last one: {event.reason}", 1)
            return
        self._waiting.insert(0, job)
        yield WorkerLost(job, worker.name, event.reason, retired)

    def _may_have(self, worker: "_Worker", job: Job) -> bool:
        """Return whether this worker did not die of the job, or all the others died of it too."""
        others = [*self._idle, *self.running.values()]
        lost = self._lost[job]
        return worker.name not in lost or all(other.name in lost for other in others)


class _Worker:
    """The process of one GPU, started with its first job and again after it was lost. losses: jobs that it died of
    since it finished one."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.losses: set[Job] = set()
        self._command = command
        self._environment = environment
        self._child: Child | None = None
        self._stopped = False

    def make(self, job: Job, tell: Tell) -> None:
        """Make a job and tell all about it, its end last; runs in a thread of the pool."""
        tell(Started(job, self.name))
        try:
            end = self._ask(job, tell)
        except (ChildDiedError, ChildTimeoutError) as error:
            end = self._lose_worker(job, str(error))
        except Exception as error:  # it cannot be started, or what it says cannot be understood
            end = self._lose_worker(job, f"{type(error).__name__}: {error}")
        tell(end)

    def stop(self, number: signal.Signals) -> None:
        """Send a signal to the process, if there is one, and start none any more."""
        self._stopped = True
        child = self._child
        if child is not None:
            child.send_signal(number)

    def close(self) -> None:
        """End the process; not while a job runs."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _ask(self, job: Job, tell: Tell) -> Event:
        if self._child is None:
            self._child = Child(self._command, os.environ | self._environment)
        if self._stopped:  # seen here, or the process was there to get the signal
            raise ChildDiedError("stopped")
        self._child.send(job.to_json())
        while True:
            answer = self._child.receive(SILENCE_SECONDS)
            if "progress" in answer:
                tell(Advanced(job, self.name, progress_from(answer["progress"])))
            elif "report" in answer:
                return Finished(job, self.name, answer["report"])
            else:
                return Failed(job, answer["error"], answer["exit_code"])

    def _lose_worker(self, job: Job, reason: str) -> WorkerLost:
        self.close()
        return WorkerLost(job, self.name, reason, retired=False)


def _environment(device: DeviceSpec, share: int) -> dict[str, str]:
    """Return what makes a process see this GPU only, before it touches CUDA, and take this many processors."""
    assert device.uuid is not None
    return {"CUDA_VISIBLE_DEVICES": canonical_uuid(device.uuid), PROCESSORS.name: str(share)}

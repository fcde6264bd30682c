"""Jobs on the GPUs of a Ray cluster.

    with connected("auto"):
        for event in RayExecutor().run(jobs):
            print(event)

Ray places each job, a task of its own, on a node with the kind of GPU, tries it again where its worker or node is lost,
and gives nodes that join late what waits. What a job needs to know is settled when it begins, not when it is submitted:
trials that the store has by then, its part of the time that is left, and configs that killed workers.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from blocktune.db.store import ResultStore
from blocktune.db.tables.location import StoreTarget
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.tuner.cluster.compiling import CodeAhead
from blocktune.tuner.cluster.received_records import ReceivedRecords
from blocktune.tuner.cluster.task_record import TaskRecord
from blocktune.tuner.cluster.tasks import RayTasks
from blocktune.tuner.cluster.worker import START_SECONDS, Message
from blocktune.tuner.fleet.job import Advanced, Event, Failed, Finished, Job, Started, WorkerLost, progress_from
from blocktune.tuner.fleet.local_executor import INTERRUPT_SECONDS, SILENCE_SECONDS
from blocktune.tuner.fleet.streamed_store import Packed, relevant_records
from blocktune.tuner.fleet.time_shares import TimeShares

HEAR_SECONDS = 0.1
"""How long the driver listens before it looks for tasks that ended, for the clock and for Ctrl-C."""

FROZEN_SECONDS = 60.0 + START_SECONDS
"""A task ends a worker that is silent; one that is silent for this much longer itself is given up."""

logger = logging.getLogger("blocktune")

CUT_SHORT = "interrupted before anything was found"


class RayExecutor:
    """An `Executor` on the cluster that this process is connected to, for one run.

    Args:
        command: starts a worker on a node; None is `worker_command()`.
        ahead_command: starts a process that compiles ahead; None is `ahead_command()`.
        excluded: software that must not measure, such as `triton=3.5`.
        seconds: of the whole run, after which it ends as by Ctrl-C; None is no bound.
        silence_seconds: how long a worker may say nothing.
        interrupt_seconds: what interrupted workers have before they are killed.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] | None = None,
        ahead_command: Sequence[str] | None = None,
        excluded: Sequence[str] = (),
        seconds: float | None = None,
        silence_seconds: float = SILENCE_SECONDS,
        interrupt_seconds: float = INTERRUPT_SECONDS,
    ) -> None:
        self._tasks = RayTasks(command, silence_seconds)
        self._ahead = CodeAhead(ahead_command)
        self._excluded = tuple(excluded)
        self._seconds = seconds
        self._frozen_seconds = silence_seconds + FROZEN_SECONDS
        self._interrupt_seconds = interrupt_seconds
        self._is_interrupted = False

    def run(self, jobs: Sequence[Job]) -> Iterator[Event]:
        with ExitStack() as stack:
            store = _open_local_store(jobs, stack)
            received = None if store is None else stack.enter_context(ReceivedRecords(store))
            stack.callback(self._tasks.end)
            stack.callback(self._ahead.end)
            run = _Run(self._tasks, self._ahead, store, received, self._excluded, TimeShares(self._seconds))
            run.begin(jobs)
            while run.is_going_on and not (self._is_interrupted or run.is_over):
                yield from run.step(self._frozen_seconds)
            yield from run.stop(report_waiting=not self._is_interrupted)
            deadline = time.monotonic() + self._interrupt_seconds
            while run.is_going_on and time.monotonic() < deadline:
                yield from run.step(self._frozen_seconds)
            yield from run.give_up()

    def interrupt(self) -> None:
        self._is_interrupted = True


def _open_local_store(jobs: Sequence[Job], stack: ExitStack) -> ResultStore | None:
    """Return the run's store if it is a file, which workers on other hosts cannot write; None for a server's."""
    if not jobs or StoreTarget.of(jobs[0].database).path is None:
        return None
    return stack.enter_context(ResultStore.open(jobs[0].database))


class _Run:
    """The driver's side of a run: which jobs there are, and what follows from what is heard of them."""

    def __init__(
        self,
        tasks: RayTasks,
        ahead: CodeAhead,
        store: ResultStore | None,
        received: ReceivedRecords | None,
        excluded: tuple[str, ...],
        shares: TimeShares,
    ) -> None:
        self._tasks, self._ahead = tasks, ahead
        self._store, self._received = store, received
        self._excluded = excluded
        self._shares = shares
        self._open: dict[int, TaskRecord] = {}
        self._attempts: dict[str, TaskRecord] = {}
        self._is_stopping = False
        self._remarks: set[str] = set()

    @property
    def is_going_on(self) -> bool:
        """Whether a job has no end yet."""
        return bool(self._open)

    @property
    def is_over(self) -> bool:
        """Whether the run's time is over."""
        return self._shares.is_over

    def begin(self, jobs: Sequence[Job]) -> None:
        """Give all jobs to Ray, the longest first."""
        self._tasks.begin()
        for number, job in enumerate(sorted(jobs, key=lambda job: job.size, reverse=True)):
            self._open[number] = TaskRecord(job, number)
            self._tasks.submit(self._open[number])

    def step(self, frozen_seconds: float) -> Iterator[Event]:
        """Wait a while and pass on what was heard."""
        ended = self._tasks.ended_tasks(self._open.values())  # looked for first, so that what these have said is heard
        for attempt, message in self._tasks.hear(HEAR_SECONDS):
            yield from self._heard(attempt, message)
        if self._received is not None:
            self._received.flush()
        for record in ended:
            yield from self._end(record)
        yield from self._give_up_frozen(frozen_seconds)
        self._compile_ahead()

    def stop(self, *, report_waiting: bool) -> Iterator[Event]:
        """Begin nothing any more, and let running searches end with what they found."""
        self._is_stopping = True
        self._ahead.end()
        for record in list(self._open.values()):
            if record.attempt:
                self._tasks.order(record.attempt, {"stop": True})
                continue
            self._tasks.cancel(record)
            del self._open[record.number]
            if report_waiting:
                error = "the time budget of the run was over before it began"
                yield Failed(record.job, error, NoFeasibleConfigError.exit_code)

    def give_up(self) -> Iterator[Event]:
        """Count the jobs that still have no end as failed."""
        yield from (Failed(record.job, CUT_SHORT, 130) for record in self._open.values())

    def _heard(self, attempt: str, message: Message) -> Iterator[Event]:
        """Pass on what a task says."""
        if "began" in message:
            yield from self._begin(attempt, message)
        elif "records" in message:
            assert self._received is not None
            self._received.add(message["records"])
        elif (record := self._attempts.get(attempt)) is not None and record.attempt == attempt:
            record.heard = time.monotonic()
            if "died" in message:
                yield from self._lose(record, message["died"], is_to_blame=True)
            elif "remark" in message:
                self._remark(record.worker, message["remark"])
            else:
                progress = progress_from(message["progress"])
                record.measuring = progress.measuring
                yield Advanced(record.job, record.worker, progress)

    def _compile_ahead(self) -> None:
        """Have the jobs that begin next compiled, where some wait."""
        if not self._is_stopping and not all(record.attempt for record in self._open.values()):
            self._ahead.keep_up(self._open.values(), self._tasks.cluster.nodes)

    def _remark(self, worker: str, text: str) -> None:
        """Log, once, a remark on something that loses no result."""
        if text not in self._remarks:
            self._remarks.add(text)
            logger.warning("%s: %s", worker, text)

    def _begin(self, attempt: str, message: Message) -> Iterator[Event]:
        """Answer a task that begins by its job, as it stands now."""
        record = self._open.get(message["began"])
        if record is None or self._is_stopping:
            self._tasks.order(attempt, {"dropped": True})
            return
        if record.attempt:
            yield from self._lose(record, "its process or its node is gone", is_to_blame=False)
        record.begin(attempt, message["node"], message["worker"])
        self._attempts[attempt] = record
        job = record.as_of_now(self._stored_records(record.job), self._excluded, self._share_of(record))
        self._tasks.order(attempt, {"job": job.to_json(), "code": self._ahead.ready_for(record)})
        yield Started(record.job, record.worker)

    def _stored_records(self, job: Job) -> tuple[Packed, ...] | None:
        """Return what the store holds for a job, with all that was heard; None where workers reach it."""
        if self._store is None or self._received is None:
            return None
        self._received.flush()
        return relevant_records(self._store, job)

    def _share_of(self, record: TaskRecord) -> float | None:
        waiting = sum(not other.attempt for other in self._open.values() if other.job.device == record.job.device)
        return self._shares.next(self._tasks.cluster.gpus_of(record.job.device), waiting + 1)

    def _lose(self, record: TaskRecord, reason: str, *, is_to_blame: bool) -> Iterator[Event]:
        """Note that an attempt was lost; Ray makes the next one."""
        worker = record.worker
        record.lose(reason, is_to_blame=is_to_blame)
        if self._tasks.has_more_attempts(record) and not self._is_stopping:
            yield WorkerLost(record.job, worker, reason, retired=False)

    def _end(self, record: TaskRecord) -> Iterator[Event]:
        """Say how a task ended that Ray does not try again."""
        if record.number not in self._open:
            return
        end = self._tasks.result(record)
        if "refused" in end and not self._is_stopping:
            record.refuse()
            if self._tasks.cluster.has_node_for(record):
                self._tasks.submit(record)
                return
            end = {"error": f"no node of the cluster may make it: {end['refused']}", "exit_code": 1}
        del self._open[record.number]
        self._ahead.forget(record)
        if "report" in end:
            yield Finished(record.job, record.worker, end["report"])
        elif "dropped" not in end:
            cut_short = self._is_stopping and "lost" in end
            error, code = (CUT_SHORT, 130) if cut_short else (end.get("error") or end["lost"], end.get("exit_code", 1))
            yield Failed(record.job, error, code)

    def _give_up_frozen(self, frozen_seconds: float) -> Iterator[Event]:
        """Take jobs from tasks that do not even say that their worker is silent, and from the nodes of these."""
        for record in list(self._open.values()):
            if record.attempt and time.monotonic() - record.heard > frozen_seconds:
                yield from self._lose(record, f"silent for {frozen_seconds:.0f} s", is_to_blame=True)
                self._tasks.cancel(record)
                record.refuse()
                self._tasks.submit(record)

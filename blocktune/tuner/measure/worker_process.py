"""A worker that measures: what it is sent, what it answers within its time, and how it is lost."""

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from blocktune.db.records.records import Outcome, Telemetry
from blocktune.kernels.values.errors import BlocktuneError
from blocktune.tuner.compile.child_process import Child, ChildDiedError, ChildTimeoutError
from blocktune.tuner.measure.load import Monitor, Watch

if TYPE_CHECKING:
    from blocktune.tuner.measure.worker import Commands

WORKER_COMMAND = (sys.executable, "-P", "-m", "blocktune.tuner.measure.worker")
"""-P keeps the working directory off the import path: a folder `kernels` or `blocktune` there must not be taken."""


class WorkerFailedError(Exception):
    """The worker answered with a failure, died or hung; what is wrong, as an outcome and a text, and whether the
    machine is to blame."""

    def __init__(self, outcome: str, text: str, *, transient: bool = False):
        super().__init__(text)
        self.outcome = outcome
        self.transient = transient


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that a worker may take for each stage before it is killed.

    running covers checks and timed rounds of one config; running_launches further launches as long as the anchor's are
    granted on top, so that a slow GPU or a long sequence is not mistaken for a hang.
    """

    setup: float = 180.0
    compiling: float = 60.0
    running: float = 15.0
    running_launches: int = 400
    finals: float = 120.0
    burst: float = 5.0


class TimingWatch:
    """Samples the GPU while the stage `timing` of a command lasts. telemetry: what was seen in the last one."""

    def __init__(self, monitor: Monitor | None) -> None:
        self.telemetry = Telemetry()
        self._monitor = monitor
        self._watching = contextlib.ExitStack()

    def enter(self, stage: str) -> None:
        """Begin a stage, which ends the one before."""
        self.close()
        if stage == "timing" and self._monitor is not None:
            watch = Watch(self._monitor)
            self._watching.callback(self._keep, watch)
            self._watching.enter_context(watch)

    def close(self) -> None:
        """End the stage; harmless when repeated."""
        self._watching.close()

    def _keep(self, watch: Watch) -> None:
        self.telemetry = watch.telemetry()


class Worker(Protocol):
    """Does the commands of tuner/measure/worker.py, one after another.

    telemetry: what the monitor saw while the last command was timed. pid: the process it is; None while there is none.
    """

    telemetry: Telemetry

    @property
    def pid(self) -> int | None: ...

    def start(self) -> bool:
        """Start it unless it is there, and return whether that was needed."""

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command whose answer `receive` waits for."""

    def receive(self, seconds: float) -> dict[str, Any]:
        """Return the next answer; raises `WorkerFailedError` or ChildLostError."""

    def ask(
        self, command: dict[str, Any], *, compiling_seconds: float, running_seconds: float, monitor: Monitor | None
    ) -> dict[str, Any]:
        """Return the result of a command; raises `WorkerFailedError`."""

    def close(self) -> None:
        """End it; harmless when repeated."""


class LocalWorker:
    """Does commands in this process, whose GPU context they share; it has no time limit.

    Args:
        commands: what does them.
    """

    def __init__(self, commands: "Commands[Any]") -> None:
        self.telemetry = Telemetry()
        self._commands = commands
        self._started = False
        self._answer: dict[str, Any] = {}

    @property
    def pid(self) -> int | None:
        return os.getpid() if self._started else None

    def start(self) -> bool:
        started, self._started = self._started, True
        return not started

    def send(self, command: Mapping[str, Any]) -> None:
        self._answer = self._commands.answer(dict(command), lambda stage: None)

    def receive(self, seconds: float) -> dict[str, Any]:
        del seconds
        return _result(self._answer)

    def ask(
        self, command: dict[str, Any], *, compiling_seconds: float, running_seconds: float, monitor: Monitor | None
    ) -> dict[str, Any]:
        """Return the result of a command.

        Raises:
            WorkerFailedError: it failed.
            BlocktuneError: it has cost this process the GPU.
        """
        del compiling_seconds, running_seconds
        watch = TimingWatch(monitor)
        try:
            answer = _result(self._commands.answer(command, watch.enter))
        finally:
            watch.close()
            self.telemetry = watch.telemetry
        result: dict[str, Any] = answer["result"]
        return result

    def close(self) -> None:
        if self._started:
            self._commands.close()
        self._started = False


def _result(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer that is no failure.

    Raises:
        WorkerFailedError: it is one.
        BlocktuneError: it is one after which this process cannot use the GPU any more.
    """
    failure = answer.get("failure")
    if failure is None:
        return answer
    if failure["fatal"]:
        raise BlocktuneError(
            f"A launch has cost this process its GPU context, so that nothing can be measured here any more: "
            f"{failure['error']}. Measure in a process of its own, by `isolate`."
        )
    raise WorkerFailedError(failure["outcome"], failure["error"], transient=failure["transient"])


class WorkerProcess:
    """A worker that can be started again after it is lost.

    Args:
        command: starts it.
        environment: is added to that of this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.telemetry = Telemetry()
        """What the monitor saw while the last command was timed."""
        self._command = command
        self._environment = environment
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        """Its process; None while there is none."""
        return None if self._child is None else self._child.pid

    def start(self) -> bool:
        """Start it unless it is there, and return whether that was needed."""
        if self._child is not None:
            return False
        self._child = Child(self._command, os.environ | self._environment)
        return True

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command whose answer `receive` waits for.

        Raises:
            ChildDiedError: the worker has ended.
        """
        assert self._child is not None
        self._child.send(command)

    def receive(self, seconds: float) -> dict[str, Any]:
        """Return the next answer, a stage or a result.

        Raises:
            WorkerFailedError: it is a failure; where its context is lost, the worker is gone afterwards.
            ChildDiedError: the worker ended instead.
            ChildTimeoutError: nothing came for so long.
        """
        assert self._child is not None
        answer = self._child.receive(seconds)
        failure = answer.get("failure")
        if failure is not None:
            if failure["fatal"]:
                self.close()
            raise WorkerFailedError(failure["outcome"], failure["error"], transient=failure["transient"])
        return answer

    def ask(
        self, command: Mapping[str, Any], *, compiling_seconds: float, running_seconds: float, monitor: Monitor | None
    ) -> dict[str, Any]:
        """Return the result of a command, and keep what the monitor sees while it is timed.

        Raises:
            WorkerFailedError: it failed. A worker that hangs, dies or lost its context is gone afterwards.
        """
        stage, seconds, watch = "compiling", compiling_seconds, TimingWatch(monitor)
        try:
            self.send(command)
            while True:
                answer = self.receive(seconds)
                watch.close()  # the rounds are over, if it was them
                if "stage" not in answer:
                    result: dict[str, Any] = answer["result"]
                    return result
                stage, seconds = answer["stage"], running_seconds
                watch.enter(stage)
        except ChildTimeoutError as error:
            self.close()
            outcome = Outcome.COMPILE_TIMEOUT if stage == "compiling" else Outcome.RUN_TIMEOUT
            raise WorkerFailedError(outcome, f"{error} while {stage}") from error
        except ChildDiedError as error:
            self.close()
            killed = error.signum == signal.SIGKILL  # from outside: most likely memory ran out
            raise WorkerFailedError(Outcome.RUN_ERROR, str(error), transient=killed) from error
        finally:
            watch.close()
            self.telemetry = watch.telemetry

    def close(self) -> None:
        """End it; harmless when repeated."""
        if self._child is not None:
            self._child.end()
            self._child = None

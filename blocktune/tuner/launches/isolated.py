"""Timed launches of a call's configs in a child process, on copies of its arguments.

A config that crashes its context, hangs or kills its process affects no other: the child is replaced, and the others
go on.
"""

import re
import sys
from collections.abc import Mapping, Sequence

from blocktune.kernels.values.errors import BlocktuneError
from blocktune.runtime.autotuned.call import Call
from blocktune.runtime.autotuned.config import UserConfig
from blocktune.tuner.compile.child_process import ChildLostError
from blocktune.tuner.jitted.compile_ahead import worker_environment
from blocktune.tuner.launches.race import Samples
from blocktune.tuner.launches.saved_call import SavedCall
from blocktune.tuner.measure.measurement import Terms
from blocktune.tuner.measure.worker_process import WorkerFailedError, WorkerProcess

COMMAND = (sys.executable, "-P", "-m", "blocktune.tuner.launches.measure_worker")

START_SECONDS = 180.0
"""A child imports the kernel's library and reads the arguments."""

ANSWER_SECONDS = 60.0
"""A config that takes longer hangs."""

MAX_CAUSE = 500

_ERROR = re.compile(r"[\w.]*(Error|Exception): ")
"""How the line of a traceback begins that names the error."""


class IsolatedLaunches:
    """Times configs in a child. failures: why a config does not run.

    Args:
        call: the call, whose kernel must be importable.
        command: starts the child.

    Raises:
        UsageError: the kernel cannot be imported by another process, or an argument cannot travel.
    """

    def __init__(self, call: Call, command: Sequence[str] = COMMAND) -> None:
        self._call, self._saved = call, SavedCall(call)
        self._worker = WorkerProcess(command, worker_environment())
        self._is_set_up = False
        self._ran: set[UserConfig] = set()
        self.failures: dict[UserConfig, str] = {}

    def rounds(self, configs: Sequence[UserConfig], count: int) -> Mapping[UserConfig, Samples]:
        """Return the times of configs that took turns; those that do not run are left out and among `failures`.

        Raises:
            BlocktuneError: a launch failed by the machine.
        """
        for config in configs:  # each for itself at first, so that a crash has a name
            if config not in self._ran and config not in self.failures:
                self._try([config], 1)
        running = [config for config in configs if config in self._ran]
        return self._try(running, count) if running else {}

    def close(self, winner: UserConfig) -> None:
        """End the child. The caller's arguments were never touched."""
        del winner
        self._worker.close()
        self._saved.close()

    def _try(self, configs: Sequence[UserConfig], count: int) -> Mapping[UserConfig, Samples]:
        """Return what the child measures; where it fails, so have the configs that it had.

        Raises:
            BlocktuneError: it failed by the machine.
        """
        command = {"command": "rounds", "configs": [config.to_json() for config in configs], "count": count}
        try:
            self._start()
            answer = self._worker.ask(
                command, compiling_seconds=ANSWER_SECONDS, running_seconds=ANSWER_SECONDS, monitor=None
            )
        except (WorkerFailedError, ChildLostError) as failed:
            if isinstance(failed, WorkerFailedError) and failed.transient and self._worker.pid is not None:
                raise self._failed_machine(failed) from failed
            if not self._is_set_up:
                self._worker.close()  # the next config begins in another child
            self._ran.difference_update(configs)
            self.failures |= dict.fromkeys(configs, cause_of(failed))
            return {}
        timed = zip(configs, answer["samples_us"], answer["failures"], strict=True)
        found = {}
        for config, samples, failure in timed:
            if samples is None:
                self.failures[config] = failure
            else:
                found[config] = tuple(samples)
        self._ran.update(found)
        return found

    def _start(self) -> None:
        if self._worker.start():
            self._is_set_up = False
            terms = Terms().to_json()
            self._worker.send({"command": "setup", "shape": self._saved.document, "terms": terms})
            self._worker.receive(START_SECONDS)
            self._is_set_up = True

    def _failed_machine(self, failed: WorkerFailedError) -> BlocktuneError:
        """Return the error of a machine that failed, with the child ended."""
        self.close(self._call.default)
        return BlocktuneError(
            f"{self._call.name} cannot be measured, since the machine failed: {failed}. Free space on the disk, or "
            "memory, and call it again."
        )


def cause_of(failed: Exception) -> str:
    """Return the error that a child's last words end with, else how it failed."""
    errors = [line for line in str(failed).splitlines() if _ERROR.match(line)]
    return (errors[-1] if errors else str(failed))[-MAX_CAUSE:]

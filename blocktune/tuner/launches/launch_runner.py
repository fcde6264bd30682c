"""The runner of an autotuned call: `LaunchRunner`."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blocktune.kernels.values.errors import BlocktuneError
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.compile_server.client import worker_environment
from blocktune.tuner.compile_server.compile_ahead import CompileAhead, compile_ahead
from blocktune.tuner.launches.launch_bench import LaunchBench, LaunchTools
from blocktune.tuner.launches.launches import prepare_arguments, require_restorable
from blocktune.tuner.launches.race import Samples
from blocktune.tuner.launches.saved_call import SavedCall
from blocktune.tuner.measure.runner import WorkerRunner
from blocktune.tuner.measure.worker import Commands
from blocktune.tuner.measure.worker_process import Deadlines, LocalWorker, Worker, WorkerFailedError, WorkerProcess

COMMAND = (sys.executable, "-P", "-m", "blocktune.tuner.launches.measure_worker")

MAX_CAUSE = 500
"""Characters of why a config has cost its process."""

_ERROR = re.compile(r"[\w.]*(Error|Exception): ")
"""How the line of a traceback begins that names the error."""


@dataclass
class LaunchRunner(WorkerRunner[LaunchConfig]):
    """Measures the configs of a call on its own arguments, between its hooks; a runner as tuner/measure/runner.py says.

    The first config of the list is the anchor unless another is named, and what the anchor computes is right: a config
    that computes something else is a `wrong_result`. Arguments that a config changes are restored.

    call: the call. Where its settings say `isolate`, a child process measures on copies of the arguments, and a config
    that crashes or hangs costs that process alone; else a crash is an error, since this process has lost its GPU.
    tools: of this process. command: starts the child. failures: why configs do not run that were to take turns.

    Raises:
        UsageError: an argument cannot be restored; in a child, also where the kernel cannot be imported or an argument
            cannot travel.
    """

    call: AutotunedCall
    tools: LaunchTools = field(default_factory=LaunchTools)
    command: Sequence[str] = COMMAND

    def __post_init__(self) -> None:
        require_restorable(self.call)
        self.anchor = self.anchor or self.call.default
        self.failures: dict[LaunchConfig, str] = {}
        self._ran: set[LaunchConfig] = set()
        self._own_bench: LaunchBench | None = None
        self._saved = SavedCall(self.call) if self.call.settings.isolate else None
        super().__post_init__()

    @property
    def label(self) -> str:
        return f"{self.call.name} {self.call.problem.label}"

    def rounds(self, configs: Sequence[LaunchConfig], count: int) -> Mapping[LaunchConfig, Samples]:
        """Return the times of configs that took turns in a race, whatever they compute; those that do not run are left
        out and among `failures`.

        Raises:
            BlocktuneError: the child failed by the machine.
            Exception: what a launch in this process raised that is not to blame on its config.
        """
        if self._saved is None:
            bench = self._own_bench = self._own_bench or self._bench(self.call, self.terms)
            timed = bench.rounds(configs, count)
            self.failures |= bench.failures
            return timed
        for config in configs:  # each for itself at first, so that a crash has a name
            if config not in self._ran and config not in self.failures:
                self._ran.update(self._rounds_of_child([config], 1))
        running = [config for config in configs if config in self._ran]
        return self._rounds_of_child(running, count) if running else {}

    def prepare_launch(self, winner: LaunchConfig) -> None:
        """Leave the arguments as the launch of a winner expects them; a child has copies."""
        if self._saved is None:
            prepare_arguments(self.call, winner)

    def close(self) -> None:
        super().close()
        if self._saved is not None:
            self._saved.close()

    def _rounds_of_child(self, configs: Sequence[LaunchConfig], count: int) -> Mapping[LaunchConfig, Samples]:
        """Return what the child measures; where it is lost, so have the configs that it had."""
        self._set_up()
        command = {"command": "rounds", "configs": [config.to_json() for config in configs], "count": count}
        try:
            answer = self._ask(command, self.deadlines.running)
        except WorkerFailedError as failed:
            if failed.transient and self._worker.pid is not None:
                raise BlocktuneError(
                    f"{self.call.name} cannot be measured, since the machine failed: {failed}. Free space on the disk, "
                    "or memory, and call it again."
                ) from failed
            self._ran.difference_update(configs)
            self.failures |= dict.fromkeys(configs, cause_of(failed))
            return {}
        self.failures |= {config: why for config, why in zip(configs, answer["failures"], strict=True) if why}
        timed = zip(configs, answer["samples_us"], strict=True)
        return {config: tuple(samples) for config, samples in timed if samples is not None}

    def _new_worker(self) -> Worker:
        if self._saved is not None:
            return WorkerProcess(self.command, worker_environment())
        return LocalWorker(Commands(self._bench, lambda _: self.call, LaunchConfig.from_json))

    def _bench(self, call: AutotunedCall, terms: Any) -> LaunchBench:
        return LaunchBench(call, self.tools, terms)

    def _problem(self) -> dict[str, Any]:
        return {} if self._saved is None else self._saved.document


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchMachine:
    """The parts of the machine that tuning a call needs.

    ahead: compiles. launches: time and meter launches. command: starts the process that measures where `isolate` is
    set, within these deadlines.
    """

    ahead: CompileAhead = compile_ahead
    launches: LaunchTools = field(default_factory=LaunchTools)
    command: Sequence[str] = COMMAND
    deadlines: Deadlines = field(default_factory=Deadlines)

    def runner(self, call: AutotunedCall, **options: Any) -> LaunchRunner:
        """Return the runner of a call; `options` are further fields of it."""
        return LaunchRunner(call, tools=self.launches, command=self.command, deadlines=self.deadlines, **options)


def cause_of(failed: Exception) -> str:
    """Return the error that a child's last words end with, else how it failed."""
    errors = [line for line in str(failed).splitlines() if _ERROR.match(line)]
    return (errors[-1] if errors else str(failed))[-MAX_CAUSE:]

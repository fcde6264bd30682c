"""The runner of an autotuned call: `LaunchRunner`."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from blocktune.runtime.autotuned.call import Call
from blocktune.runtime.autotuned.config import UserConfig
from blocktune.tuner.jitted.compile_ahead import worker_environment
from blocktune.tuner.launches.isolated import COMMAND
from blocktune.tuner.launches.launch_bench import LaunchBench, LaunchTools
from blocktune.tuner.launches.launches import brings_its_own_bench, require_restorable
from blocktune.tuner.launches.saved_call import SavedCall
from blocktune.tuner.measure.runner import WorkerRunner
from blocktune.tuner.measure.worker import Commands
from blocktune.tuner.measure.worker_process import LocalWorker, Worker, WorkerProcess

logger = logging.getLogger("blocktune")


@dataclass
class LaunchRunner(WorkerRunner[UserConfig]):
    """Measures the configs of a call on its own arguments, between its hooks; a runner as tuner/measure/runner.py says.

    The first config of the list is the anchor unless another is named, and what the anchor computes is right: a config
    that computes something else is a `wrong_result`. Arguments that a config changes are restored.

    call: the call. Where its settings say `isolate`, a child process measures on copies of the arguments, and a config
    that crashes or hangs costs that process alone; else a crash is an error, since this process has lost its GPU.
    tools: of this process. command: starts the child.

    Raises:
        UsageError: an argument cannot be restored; in a child, also where the kernel cannot be imported or an argument
            cannot travel.
    """

    call: Call
    tools: LaunchTools = field(default_factory=LaunchTools)
    command: Sequence[str] = COMMAND

    def __post_init__(self) -> None:
        require_restorable(self.call)
        if brings_its_own_bench(self.call):
            logger.warning("%s: a search times launches by events, not by the kernel's `do_bench`.", self.call.name)
        self.anchor = self.anchor or self.call.default
        self._saved = SavedCall(self.call) if self.call.settings.isolate else None
        super().__post_init__()

    @property
    def label(self) -> str:
        return f"{self.call.name} {self.call.problem.label}"

    def close(self) -> None:
        super().close()
        if self._saved is not None:
            self._saved.close()

    def _new_worker(self) -> Worker:
        if self._saved is not None:
            return WorkerProcess(self.command, worker_environment())
        return LocalWorker(Commands(self._bench, lambda _: self.call, UserConfig.from_json))

    def _bench(self, call: Call, terms: Any) -> LaunchBench:
        return LaunchBench(call, self.tools, terms)

    def _problem(self) -> dict[str, Any]:
        return {} if self._saved is None else self._saved.document

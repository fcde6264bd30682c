"""Timed launches of a call's configs in a child process, on copies of its arguments.

A config that crashes its context, hangs or kills its process affects no other: the child is replaced, and the others
go on.
"""

import inspect
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from blocktune.kernels.tuned.call import Call
from blocktune.kernels.tuned.config import UserConfig
from blocktune.kernels.values.errors import BlocktuneError, UsageError
from blocktune.tuner.compile.child_process import Child, ChildLostError
from blocktune.tuner.jitted.compile_ahead import worker_environment
from blocktune.tuner.jitted.specialization import is_importable
from blocktune.tuner.turns.arguments import save_arguments
from blocktune.tuner.turns.race import Samples

COMMAND = (sys.executable, "-P", "-m", "blocktune.tuner.turns.measure_worker")

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
        command: starts the child; the parent's process id follows.

    Raises:
        UsageError: the kernel cannot be imported by another process, or an argument cannot travel.
    """

    def __init__(self, call: Call, command: Sequence[str] = COMMAND) -> None:
        if not is_importable(call):
            raise UsageError(
                f"`isolate` measures in another process, which must import the kernel, but {call.name} is in a script, "
                "a notebook or a function. Move it into a module, or leave out `isolate`."
            )
        self._call, self._command = call, tuple(command)
        self._folder = tempfile.TemporaryDirectory(prefix="blocktune-")
        self._child: Child | None = None
        self._ran: set[UserConfig] = set()
        self.failures: dict[UserConfig, str] = {}
        launched = {name: value for name, value in call.kwargs.items() if name not in ("grid", "warmup")}
        self._subject = {
            "kernel": call.name,
            "source_hash": call.source_hash,
            "folder": self._folder.name,
            "arguments": save_arguments(call.args, launched, Path(self._folder.name)),
            "grids": grids_of(call),
            "configs": [config.to_json() for config in call.configs],
            "l2": call.settings.l2,
            "device": torch.cuda.current_device() if torch.cuda.is_available() else None,
        }

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
        self._discard()

    def _discard(self) -> None:
        self._end()
        self._folder.cleanup()

    def _try(self, configs: Sequence[UserConfig], count: int) -> Mapping[UserConfig, Samples]:
        """Return what the child measures; where it is lost, the configs that it had have failed."""
        try:
            child = self._child or self._start()
            child.send({"configs": [config.to_json() for config in configs], "count": count})
            answer = child.receive(ANSWER_SECONDS)
        except ChildLostError as lost:
            self._end()
            for config in configs:
                self._ran.discard(config)
                self.failures[config] = cause_of(lost)
            return {}
        if "machine" in answer:
            self._discard()
            raise BlocktuneError(
                f"{self._call.name} cannot be measured, since the machine failed: {answer['machine']}. Free space on "
                "the disk, or memory, and call it again."
            )
        for config, failure in zip(configs, answer["failures"], strict=True):
            if failure:
                self.failures[config] = failure
        timed = zip(configs, answer["samples_us"], strict=True)
        found = {config: tuple(samples) for config, samples in timed if samples is not None}
        self._ran.update(found)
        return found

    def _start(self) -> Child:
        self._child = Child((*self._command, str(os.getpid())), worker_environment())
        self._child.send(self._subject)
        self._child.receive(START_SECONDS)
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


def cause_of(lost: ChildLostError) -> str:
    """Return the error that a child's last words end with, else how it ended."""
    errors = [line for line in str(lost).splitlines() if _ERROR.match(line)]
    return (errors[-1] if errors else str(lost))[-MAX_CAUSE:]


def grids_of(call: Call) -> dict[str, Any]:
    """Return the grid of a call by the constants that its configs give, for a process that has no function to compute
    it."""
    names = sorted({name for config in call.configs.values() for name in config.kwargs})
    rows = {}
    for config in call.configs.values():
        meta = meta_of(call, config.all_kwargs())
        rows[tuple(meta.get(name) for name in names)] = call.grid(meta)
    return {"names": names, "rows": [[list(values), list(found)] for values, found in rows.items()]}


def meta_of(call: Call, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a grid function is given: all arguments by name, defaults and heuristics included."""
    defaults = {
        name: param.default
        for name, param in call.function.signature.parameters.items()
        if param.default is not inspect.Parameter.empty
    }
    meta = {**defaults, **call.named, **options}
    holder = call.tuner.fn
    while holder is not call.function:
        for name, value in getattr(holder, "values", {}).items():
            meta[name] = value(meta)
        holder = holder.fn
    return meta

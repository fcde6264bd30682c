"""The use case: tune a user's own function for one call, from its choices to the stored winner.

    report = tune_function(softmax, (x,))
    print(report.best.config.label, report.best.time_us)

It is as for our own kernels, but for compiling ahead: a candidate is compiled where it is measured, before its time is
taken.
"""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blocktune.db.user_store import UserKernelStore
from blocktune.kernels.hardware.device import DeviceSpec, current_device
from blocktune.kernels.tuned.function import TunedFunction
from blocktune.kernels.values.errors import NoDeviceError, UsageError
from blocktune.tuner.search.loop import Limit
from blocktune.tuner.search.report import Budget
from blocktune.tuner.tuned.run import OnTrial, UserReport, UserRun

WORKER_COMMAND = (sys.executable, "-P", "-m", "blocktune.tuner.tuned.worker")

DEFAULT_LIMIT = Limit(trials=256, seconds=300.0)
"""More time than our own kernels get, since nothing is compiled ahead."""


def tune_function(
    function: TunedFunction,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = None,
    store: UserKernelStore | None = None,
    seed: int = 0,
    on_trial: OnTrial | None = None,
    device: DeviceSpec | None = None,
    command: Sequence[str] = WORKER_COMMAND,
) -> UserReport:
    """Finds the best parameters of a tuned function for a call, stores them and every trial, and reports.

    Trials that the store holds for the same device, software, source and problem count as made. Later calls of the
    function in this process take what was found.

    Args:
        function: what to tune; the module that holds it must be importable by another process.
        args: the positional arguments of the call; candidates get copies of them.
        kwargs: its arguments by name; candidates get copies of them, too.
        budget: bounds, earlier runs' trials included; a bound that is None takes its default.
        store: where results are kept; None is the user's store.
        seed: of the sampler.
        on_trial: called with how each candidate ended.
        device: whose results these are; None is the GPU that holds the arguments.
        command: starts the process that measures.

    Raises:
        UsageError: the function is not importable, the arguments are not its own or not in a sequence and a mapping, or
            a CUDA graph is being captured.
        NoDeviceError: no argument is on a GPU, and no device was named.
        NoFeasibleConfigError: no config fulfils the constraints, runs and is right.
        KeyboardInterrupt: interrupted before anything was found; trials are kept.
    """
    _require_collections(args, kwargs)
    arguments = function.bound(args, kwargs or {})
    _require_tunable(function)
    device = device or _device_of(arguments)
    budget = budget or Budget()
    limit = Limit(trials=budget.trials or DEFAULT_LIMIT.trials, seconds=budget.seconds or DEFAULT_LIMIT.seconds)
    with contextlib.ExitStack() as stack:
        if store is None:
            store = stack.enter_context(UserKernelStore.open())
        run = UserRun(function, arguments, device, store, on_trial or (lambda trial: None))
        report = run.known_report(limit) or run.execute(limit, seed, command)
    function.reload()
    return report


def _require_collections(args: object, kwargs: object) -> None:
    """Raises:
    UsageError: the arguments of the call stand where their sequence or their mapping belongs.
    """
    if isinstance(args, Tensor) or not isinstance(args, Sequence) or not isinstance(kwargs, Mapping | None):
        given = ", ".join(type(value).__name__ for value in (args, kwargs) if value is not None)
        raise UsageError(
            f"`tune_function` takes the arguments of the call as a list and a dictionary, but got {given}. "
            "Write tune_function(function, [x, y], {'name': value})."
        )


def _require_tunable(function: TunedFunction) -> None:
    """Raises:
    UsageError: another process could not find the function, or a CUDA graph is being captured.
    """
    module, _, name = function.name.partition(":")
    if module == "__main__" or "<locals>" in name:
        raise UsageError(
            f"A tuned function is importable, since candidates run in a process of their own, but {function.name} is "
            "not. Move it to the top level of a module."
        )
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            f"Tuning launches and waits, which a CUDA graph cannot record, but one is being captured on this stream. "
            f"Tune {function.name} before."
        )


def _device_of(arguments: Mapping[str, Any]) -> DeviceSpec:
    tensor = next((value for value in arguments.values() if isinstance(value, Tensor) and value.is_cuda), None)
    if tensor is None:
        raise NoDeviceError(
            "Tuning measures on a GPU, but no argument of the call is on one. Pass tensors that are; the time of "
            "your own function is not predicted."
        )
    return current_device(tensor.device.index)

"""torch.compile: Inductor takes the whole list of an autotuned kernel and tunes it again. Where the winner of a call is
known, a graph gets a list of that one instead, when the call is traced.

PyTorch's own tracing comes first: it evaluates heuristics, grids and pruning.
"""

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.autotuner import Autotuner, Config

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.boundary import tolerance
from blocktune.runtime.autotuned.call import AutotunedCall, positional
from blocktune.runtime.autotuned.kernel import TunedKernel
from blocktune.tuner.drop_in.decide import device_of, settled_choice

logger = logging.getLogger("blocktune")

KernelOf = Callable[[Autotuner], TunedKernel | None]

_TRACING = "torch._higher_order_ops.triton_kernel_wrap"
"""The module of PyTorch that traces kernels. To import it takes half a second, so it is changed when it is imported."""

_finders: list[KernelOf] = []
_traced: ContextVar[TunedKernel | None] = ContextVar("blocktune_traced", default=None)
"""The kernel whose call is traced: PyTorch wraps its function again for heuristics and pruning."""


def hand_winners(kernel_of: KernelOf) -> None:
    """Let torch.compile have the known winners of kernels from now on.

    Args:
        kernel_of: returns what stands under a tuner of Triton's; None of one that stays as it is.
    """
    if kernel_of in _finders:
        return
    _finders.append(kernel_of)
    if len(_finders) > 1:
        return
    if _TRACING in sys.modules:
        _change(sys.modules[_TRACING])
    else:
        sys.meta_path.insert(0, _TracingFinder())


class _TracingFinder(MetaPathFinder):
    """Changes PyTorch's module right after it is loaded."""

    def __init__(self) -> None:
        self._asks_others = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != _TRACING or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asks_others = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                with suppress(ValueError):  # another thread has loaded it
                    sys.meta_path.remove(self)
                _change(module)

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def _change(module: ModuleType) -> None:
    """Let both ways of tracing, Dynamo's and that of `torch.library.wrap_triton`, ask for winners."""
    with tolerance("torch.compile", "known winners"):
        trace = module.TritonHOPifier.call_triton_kernel

        def call_triton_kernel(self: Any, variable: Any, *rest: Any) -> Any:
            self.__dict__.setdefault("call_HOP", partial(_call_with_winner, self))
            with _traces(_kernel_of(variable.kernel)):
                return trace(self, variable, *rest)

        module.TritonHOPifier.call_triton_kernel = call_triton_kernel


def _kernel_of(tuner: Any) -> TunedKernel | None:
    """Return what stands under a tuner; None of a function that is only jitted, and of a tuner that stays as it is."""
    if not isinstance(tuner, Autotuner):
        return None
    return next((kernel for kernel_of in _finders if (kernel := kernel_of(tuner)) is not None), None)


@contextmanager
def _traces(kernel: TunedKernel | None) -> Iterator[None]:
    """Note the kernel whose call is traced, unless this is a step on the way of another one."""
    if _traced.get() is not None:
        yield
        return
    token = _traced.set(kernel)
    try:
        yield
    finally:
        _traced.reset(token)


def _call_with_winner(tracer: Any, variable: Any, grids: Sequence[Any], arguments: dict[str, Any], *rest: Any) -> Any:
    """Trace a launch as PyTorch does, with a list of the winner alone and its grid where the winner is known.

    Args:
        tracer: PyTorch's object.
        variable: its description of the kernel, with the list that pruning and heuristics have left.
        grids: of each config of the list, or one for all.
        arguments: of the launch, by name.
        rest: further arguments.

    Raises:
        UsageError: the kernel is strict, and no winner is known.
    """
    kernel, tuner = _traced.get(), variable.kernel
    index = None if kernel is None or not isinstance(tuner, Autotuner) else _winner(kernel, tuner, grids, arguments)
    if index is not None:
        alone = triton.autotune([tuner.configs[index]], key=[])(tuner.fn)
        variable = tracer.recreate_variable(variable, kernel=alone, kernel_idx=None, grid=variable.grid)
        grids = [grids[index if len(grids) > 1 else 0]]
    return type(tracer).call_HOP(tracer, variable, grids, arguments, *rest)


def _winner(kernel: TunedKernel, tuner: Autotuner, grids: Sequence[Any], arguments: Mapping[str, Any]) -> int | None:
    """Return which config of a traced list is the known winner; None if none is, or nothing is to be chosen.

    Raises:
        UsageError: the kernel is strict, and no winner is known.
    """
    call = device = None
    if len(tuner.configs) > 1:
        with tolerance(kernel.name, "its winner for torch.compile"):
            call = _traced_call(kernel, grids[0], arguments)
            device = device_of(call)
    if call is None or device is None:
        return None
    choice = settled_choice(call, device)
    winner = None if choice is None else choice.launched
    found = next((number for number, config in enumerate(tuner.configs) if winner and _holds(config, winner)), None)
    if found is None:
        logger.warning(
            "%s: %s for %s, so that Inductor measures the whole list, and no store gets the result. Launch it once "
            "without torch.compile, or under `blocktune.tune_at_warmup`.",
            kernel.name,
            f"the winner {winner} is not in its list" if winner else "no winner is known",
            call.problem.label,
        )
    return found


def _holds(traced: Config, winner: Config) -> bool:
    """Return whether a traced config is the winner, to whose constants PyTorch may have added those of heuristics."""
    own = traced.all_kwargs()
    return all(own.get(name) == value for name, value in winner.all_kwargs().items())


def _traced_call(kernel: TunedKernel, grid: Any, arguments: Mapping[str, Any]) -> AutotunedCall:
    """Return a launch that is traced, with tensors without memory."""
    named = {name: _stand_in(_traced_value(value)) for name, value in arguments.items()}
    sizes = tuple(_stand_in(_traced_value(size)) for size in grid)
    args, kwargs = positional(kernel.tuner, named)
    return kernel.call_of(args, {**kwargs, "grid": sizes, "warmup": False})


def _traced_value(value: Any) -> Any:
    """Return what PyTorch knows of a value while it traces: a constant, or a tensor or number without content."""
    if isinstance(value, torch.fx.Proxy):
        return value.node.meta["example_value"]
    if not hasattr(value, "as_python_constant"):
        return value
    described = value.realize()  # by Dynamo
    return described.as_python_constant() if described.is_python_constant() else _traced_value(described.as_proxy())


def _stand_in(value: Any) -> Any:
    """Return a tensor or number whose sizes are those of the call that is traced; other values are as they are.

    Raises:
        UsageError: a size depends on data.
    """
    if isinstance(value, Tensor):
        with _disable_current_modes():
            sizes, strides = (tuple(map(_stand_in, each)) for each in (value.size(), value.stride()))
            place = _stand_in(value.storage_offset())
            return torch.empty(0, dtype=value.dtype, device="meta").as_strided(sizes, strides, place)
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value
    if not value.node.has_hint():
        raise UsageError(f"A size of the call depends on data: {value}.")
    return value.node.hint

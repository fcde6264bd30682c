"""PyTorch's tools around the functions that are checked: compilers, checkpoints, DTensor and fake tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from blocktune.runtime.api.hugging_face.attention import transformers_attention
from tools.differential.calls.problems import Subject
from tools.differential.cases.case import Case
from tools.differential.cases.enums import COMPILED, Mode

Function = Callable[..., Any]

COMPILER_MODES = {Mode.OVERHEAD: "reduce-overhead", Mode.AUTOTUNED: "max-autotune"}
OWN = {"transformers_attention": transformers_attention}
"""What is called besides the subject's functions."""

LEAST_DIMENSIONS = 3
"""Of tensors that are spread over ranks; those of fewer describe them."""


class Wrapped:
    """A subject whose functions are called through a tool."""

    def __init__(self, subject: Subject, tool: Callable[[Function], Function]) -> None:
        self._subject, self._tool = subject, tool

    def __getattr__(self, name: str) -> Function:
        function = self._tool(getattr(self._subject, name, OWN.get(name)))
        setattr(self, name, function)  # a function is compiled once
        return function


def with_tools(case: Case, subject: Subject) -> Subject:
    """The subject as a case's mode calls it."""
    if case.mode in COMPILED:
        return Wrapped(subject, partial(_compile, case))
    tools = {Mode.CHECKPOINT: _checkpoint, Mode.DTENSOR: _spread, Mode.FAKE: _foretold}
    return Wrapped(subject, tools[case.mode]) if case.mode in tools else subject


def _compile(case: Case, function: Function) -> Function:
    """A new compilation of the function. Without a GPU its graphs run as they are: a CPU's compiler takes minutes."""
    torch.compiler.reset()
    options: dict[str, Any] = {"dynamic": case.dynamic or None, "fullgraph": case.mode is Mode.FULL_GRAPH}
    if not torch.cuda.is_available():
        options["backend"] = "aot_eager"
    elif case.mode in COMPILER_MODES:
        options["mode"] = COMPILER_MODES[case.mode]

    @torch.compile(**options)
    def compiled(*arguments: Any, **others: Any) -> Any:
        return function(*arguments, **others)

    def call(*arguments: Any, **others: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return _copy(compiled(*arguments, **others))

    return call


def _copy(result: Any) -> Any:
    """The result in memory that no replay writes to."""
    if isinstance(result, tuple):
        return tuple(map(_copy, result))
    return result.clone() if isinstance(result, Tensor) else result


def _checkpoint(function: Function) -> Function:
    return partial(checkpoint, function, use_reentrant=False)


def offloading() -> saved_tensors_hooks:
    """Hooks that keep what is saved for the backward on the CPU."""
    return saved_tensors_hooks(lambda own: (own.device, own.to("cpu", copy=True)), lambda kept: kept[1].to(kept[0]))


def reordering() -> saved_tensors_hooks:
    """Hooks that bring saved matrices back with their columns apart."""
    return saved_tensors_hooks(lambda own: own, lambda own: own.mT.contiguous().mT if own.dim() > 1 else own.clone())


def _spread(function: Function) -> Function:
    """The function of DTensors, replicated on the one rank."""
    from torch.distributed.tensor import DTensor, Replicate

    def call(*arguments: Any, **others: Any) -> Any:
        def spread(given: Any) -> Any:
            if not isinstance(given, Tensor) or given.dim() < LEAST_DIMENSIONS:
                return given
            return DTensor.from_local(given, _mesh(given.device.type), [Replicate()], run_check=False)

        def local(found: Any) -> Any:
            return found.to_local() if isinstance(found, DTensor) else found

        result = function(*map(spread, arguments), **{name: spread(given) for name, given in others.items()})
        return tuple(map(local, result)) if isinstance(result, tuple) else local(result)

    return call


def _mesh(device: str) -> Any:
    """The mesh of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device, (1,))


def _foretold(function: Function) -> Function:
    """The function, of fake tensors first, which must give the same sizes and types."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def call(*arguments: Any, **others: Any) -> Any:
        fakes = FakeTensorMode()

        def faked(given: Any) -> Any:
            return fakes.from_tensor(given.detach()) if isinstance(given, Tensor) else given

        given = [*map(faked, arguments)], {name: faked(own) for name, own in others.items()}
        with fakes:
            told = function(*given[0], **given[1])
        result = function(*arguments, **others)
        first, second = (own[0] if isinstance(own, tuple) else own for own in (told, result))
        if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
            raise AssertionError(f"fake tensors say {first.dtype} {tuple(first.shape)} of {tuple(second.shape)}")
        return result

    return call

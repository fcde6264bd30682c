"""Triton without a compiler and without a GPU: what reaches a kernel's launcher is written down."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from blocktune.kernels.base import launch, steps
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.portable.decode import launch as decode
from blocktune.runtime.api.cache import appending
from blocktune.runtime.dispatch import dispatcher, engine, obstacles, resolver
from blocktune.runtime.selection import canary

Calls = list[tuple[Any, ...]]


class Recorder:
    """Stands for a jitted function or a compiled kernel: `recorder[grid](*arguments)` is written down, and Triton's
    hooks are called."""

    def __init__(self, returns: Any = None) -> None:
        self.calls: Calls = []
        self.returns = returns

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            knobs.runtime.launch_enter_hook(SimpleNamespace())
            self.calls.append((grid, arguments, options))
            return self.returns

        return run


class Launcher:
    """Stands for Triton 3.6's launcher of a compiled kernel: what reaches its C function is written down."""

    launch_cooperative_grid, launch_pdl = False, True
    profile_scratch_size = 0

    def __init__(self, *, described: int, scratch: int = 0) -> None:
        self.global_scratch_size = scratch
        self.calls: Calls = []
        launcher = lambda *arguments: self.calls.append(arguments)  # noqa: E731 - the name is what a closure keeps

        def inner(*arguments: Any) -> None:
            launcher(*arguments)

        self.launch = inner if described else launcher


class Compiled:
    """Stands for a compiled kernel with some descriptors."""

    function, packed_metadata = "function", "packed"

    def __init__(self, described: int, metadata: tuple[Any, ...] | None = None, scratch: int = 0) -> None:
        self.run = Launcher(described=described, scratch=scratch)
        self.metadata = SimpleNamespace(tensordesc_meta=metadata or tuple(f"meta{i}" for i in range(described)))
        self.ordinary = Recorder()

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        return self.ordinary[grid]


def pretend_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 3 is the current one, and each device has one stream."""
    monkeypatch.setattr("torch._C._cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr("torch._C._cuda_getCurrentRawStream", lambda index: 100 + (index or 0), raising=False)
    pretend_side_thread(monkeypatch)


def pretend_side_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that outlives a call is allocated on the calling thread, on the CPU."""
    monkeypatch.setattr("blocktune.kernels.portable.decode.scratch.run_on_side_thread", lambda task, device: task())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)


def pretend_kernels(monkeypatch: pytest.MonkeyPatch, calls: Calls | None = None) -> Calls:
    """The CPU as an H200 whose kernels are neither compiled nor run. Return the arguments of all direct launches, which
    the test may clear; a map is a text with what it was encoded of. They are appended to `calls` if it is given."""
    calls = [] if calls is None else calls

    def run(self: Any, *arguments: Any, **options: Any) -> Compiled:
        del self, options
        made = Compiled(sum(hasattr(argument, "block_shape") for argument in arguments))
        made.run.calls = calls
        knobs.runtime.launch_enter_hook(SimpleNamespace())
        return made

    def encode(description: Any, metadata: Any) -> list[Any]:
        sizes = *description.shape, *description.strides
        return [("map", description.base.data_ptr(), metadata, description.block_shape, sizes), *sizes]

    pretend_stream(monkeypatch)
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", encode)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    for module in (launch, steps, decode):
        monkeypatch.setattr(module, "can_pin", lambda compiled: True)
    for module in (obstacles, dispatcher, appending):
        monkeypatch.setattr(module, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: device_named("h200"))
    monkeypatch.setattr(canary, "sampled", lambda *_: None)
    monkeypatch.setattr(engine, "_may_repeat", lambda *_: True)
    return calls

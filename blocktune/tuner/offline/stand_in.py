"""A GPU that need not be here, for programs that launch Triton kernels: nothing is launched.

    with stand_in(device_named("h200")):
        step()  # finds an H200, makes its tensors there, and launches kernels that do nothing

Imports of libraries belong in it as well, as many look for the GPU then. At its end PyTorch and Triton are as they
were, but a module that was imported in it keeps what it found: import libraries so in a process of its own.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch.amp.autocast_mode import autocast
from torch.autograd.function import BackwardCFunction
from triton.runtime.driver import driver

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.limits import WARP_SIZE
from blocktune.tuner.offline.stand_in_driver import StandInDriver
from blocktune.tuner.offline.stand_in_tensors import TensorsOfAGpu

USUAL_MEMORY_BYTES = 80 << 30
"""Of a GPU whose memory is not known."""


@contextlib.contextmanager
def stand_in(device: DeviceSpec) -> Iterator[StandInDriver]:
    """Let PyTorch and Triton find a GPU on which launches do nothing."""
    found = StandInDriver(device)
    mode = TensorsOfAGpu()
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # what was compiled before is not traced here
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for place, name, value in _replacements(device, mode):
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, value)
        stack.callback(setattr, driver, "_active", driver._active)
        driver.set_active(found)
        stack.enter_context(mode)
        yield found


def _replacements(device: DeviceSpec, mode: TensorsOfAGpu) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced: an object, the name of its attribute, and the value."""
    for name, value in _facts(device).items():
        yield torch.cuda, name, _always(value)
    for name, made in _objects().items():
        yield torch.cuda, name, made
    yield torch, "compile", _as_it_is
    yield torch, "Generator", _GeneratorOfTheCpu
    yield from _autocasting()
    yield torch.version, "cuda", torch.version.cuda or "12.8"
    yield BackwardCFunction, "apply", _within(BackwardCFunction.apply, mode)
    yield torch.library.Library, "impl", _registering(torch.library.Library.impl, mode)


def _autocasting() -> Iterator[tuple[Any, str, Any]]:
    """Yield what lets a program cast for the GPU, whose tensors are cast by the rules of the CPU."""

    @wraps(autocast.__init__)
    def cast(self: Any, device_type: str, dtype: Any = None, *rest: Any, **options: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        stock(self, device_type, dtype, *rest, **options)

    stock = autocast.__init__
    yield autocast, "__init__", cast
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        yield torch, name, _of_the_cpu(getattr(torch, name))
    yield torch, "get_autocast_gpu_dtype", _of_the_cpu(torch.get_autocast_dtype)


def _of_the_cpu(function: Callable[[str], Any]) -> Callable[..., Any]:
    return lambda device_type="cuda": function("cpu" if device_type == "cuda" else device_type)


def _as_it_is(model: Any = None, **_: Any) -> Any:
    """Return a function that `torch.compile` would compile, or the decorator of one."""
    return _as_it_is if model is None else model


def _facts(device: DeviceSpec) -> dict[str, Any]:
    """Return what functions of `torch.cuda` answer, by name."""
    major, minor = device.limits.cc
    memory_bytes = device.memory_bytes or USUAL_MEMORY_BYTES
    return {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": major >= 8,
        "is_current_stream_capturing": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": device.name,
        "get_device_capability": (major, minor),
        "get_device_properties": _properties(device, memory_bytes),
        "get_arch_list": [f"sm_{device.limits.sm_arch}"],
        "mem_get_info": (memory_bytes, memory_bytes),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "synchronize": None,
        "empty_cache": None,
        "set_device": None,
        "init": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }


def _properties(device: DeviceSpec, memory_bytes: int) -> SimpleNamespace:
    limits = device.limits
    return SimpleNamespace(
        name=device.name,
        major=limits.cc[0],
        minor=limits.cc[1],
        multi_processor_count=device.num_sms,
        total_memory=memory_bytes,
        L2_cache_size=device.l2_bytes or 0,
        warp_size=WARP_SIZE,
        max_threads_per_multi_processor=WARP_SIZE * limits.max_warps_per_sm,
        regs_per_multiprocessor=limits.registers_per_sm,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=limits.shared_per_block_optin_bytes,
        shared_memory_per_multiprocessor=limits.shared_per_sm_bytes,
        gcnArchName="",
    )


class _Waiting:
    """A stream, an event or a graph that nothing waits for; a context as well."""

    cuda_stream, device = 0, torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "_Waiting":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def record(self, *_: Any) -> None:
        pass

    wait = wait_event = wait_stream = synchronize = replay = reset = record

    def record_event(self, *_: Any) -> "_Waiting":
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "_Waiting") -> float:
        return 1.0


class _GeneratorOfTheCpu(torch.Generator):  # type: ignore[misc]
    """A generator that a program makes for the GPU, whose numbers are drawn on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")


def _objects() -> dict[str, Any]:
    """Return what takes the place of streams, events and devices of `torch.cuda`, by name."""
    names = [
        "Stream",
        "Event",
        "device",
        "device_of",
        "stream",
        "current_stream",
        "default_stream",
        "CUDAGraph",
        "graph",
    ]
    return dict.fromkeys(names, _Waiting)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _within(function: Callable[..., Any], mode: TensorsOfAGpu) -> Callable[..., Any]:
    """Return a function that PyTorch calls without its function modes, in which tensors are on the GPU."""

    @wraps(function)
    def within(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return within


def _registering(impl: Callable[..., Any], mode: TensorsOfAGpu) -> Callable[..., Any]:
    """Return `Library.impl`, which makes operators of the GPU those of the CPU, and lets them find their tensors on the
    GPU, as PyTorch calls them without its function modes."""
    moved = set[str]()

    @wraps(impl)
    def registered(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        if dispatch_key == "CUDA":
            moved.add(str(op_name))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it replaces the one of the CPU is meant
                return impl(self, op_name, _within(fn, mode), "CPU", **options | {"allow_override": True})
        if dispatch_key == "CPU" and str(op_name) in moved:
            return None
        ours = _within(fn, mode) if dispatch_key in ("CPU", "") else fn
        return impl(self, op_name, ours, dispatch_key, **options)

    return registered

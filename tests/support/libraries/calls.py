"""The calls of autotuned kernels that a piece of code makes, each handed over once, with its live arguments."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner

from blocktune.runtime.autotuned.kernel import TunedKernel
from blocktune.runtime.autotuned.settings import Settings
from blocktune.tuner.drop_in.autotune import TunedAutotuner
from blocktune.tuner.drop_in.decide import decide
from tests.support.fakes.fake_triton import FakeGpu, active

OnCall = Callable[[TunedKernel, tuple[Any, ...], dict[str, Any]], None]


@contextlib.contextmanager
def handed_over(on_call: OnCall) -> Iterator[None]:
    """Hand over the first call of each kind of every autotuned kernel, before Triton's own tuner launches it with what
    the kernel's cache has for it. So do kernels that are decorated for ours."""
    seen = set[Any]()
    kernels: dict[int, TunedKernel] = {}

    stock, ours = Autotuner.run, TunedAutotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = kernels.setdefault(id(self), TunedKernel(self, Settings(), decide))
        problem = kernel._key.problem(args, kwargs)
        if (kernel.name, problem) not in seen:
            seen.add((kernel.name, problem))
            on_call(kernel, args, kwargs)
        return stock(self, *args, **kwargs)

    Autotuner.run = TunedAutotuner.run = run
    try:
        yield
    finally:
        Autotuner.run, TunedAutotuner.run = stock, ours


@contextlib.contextmanager
def as_on_an_h200() -> Iterator[FakeGpu]:
    """Let libraries find an H200 when they look for one, on which launches do nothing. To be entered before they are
    imported; what they find stays with them, so this belongs to a process of its own."""
    properties = SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        L2_cache_size=50 << 20,
        total_memory=141 << 30,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=232_448,
    )
    facts: dict[str, Any] = {
        "get_device_name": "NVIDIA H200",
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "device_count": 1,
        "is_available": True,
        "is_current_stream_capturing": False,
    }
    before = {name: getattr(torch.cuda, name) for name in facts}
    for name, fact in facts.items():
        setattr(torch.cuda, name, lambda *_, fact=fact: fact)
    with active(FakeGpu()) as gpu:
        yield gpu
    for name, function in before.items():
        setattr(torch.cuda, name, function)

"""What a launch that is known costs the host: under this tuner, under Triton's own, and with no tuner at all."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner

from blocktune.runtime.autotuned.kernel import TunedKernel
from blocktune.runtime.autotuned.stock_tuner import stock_key
from blocktune.tuner.measure.environment import source_commit
from tests.support.libraries import steps as library_steps
from tests.support.libraries.calls import handed_over

STEPS = ("fla l2 norm", "fla layer norm", "fla rotary", "fla swiglu", "liger dyt")
"""Passes of kernels that take a few microseconds of the GPU, which does not hold up the host then."""

ROUNDS, LAUNCHES = 30, 100

run_stock = Autotuner.run
"""Triton's own, while calls are handed over."""


def known_calls() -> list[dict[str, Any]]:
    """Return a row for each autotuned kernel of the passes, which run with the first configs of their lists."""
    rows: dict[str, dict[str, Any]] = {}

    def on_call(kernel: TunedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = kernel.call_of(args, kwargs)
        kernel.tuner.cache[stock_key(kernel.tuner, args, kwargs)] = call.configs[call.default]
        if len(call.configs) > 1 and kernel.name not in rows:
            rows[kernel.name] = {
                "kernel": kernel.name,
                "commit": source_commit(),
                **host_times_us(kernel, args, kwargs),
            }

    with handed_over(on_call):
        for step in STEPS:
            library_steps.STEPS[step]("cuda")
    return list(rows.values())


def host_times_us(kernel: TunedKernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, float]:
    """Return what a launch takes of the host in each way: the least of rounds that take turns."""
    tuner, options = kernel.tuner, dict(kernel.options(args, kwargs))
    ways: dict[str, Callable[[], Any]] = {
        "launch_us": lambda: tuner.fn.run(*args, **kwargs, **options),
        "stock_us": lambda: run_stock(tuner, *args, **kwargs),
        "ours_us": lambda: tuner.fn.run(*args, **kwargs, **kernel.options(args, kwargs)),
    }
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, launch in ways.items():
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(LAUNCHES):
                launch()
            least[name] = min(least[name], (time.perf_counter() - begun) / LAUNCHES * 1e6)
    return least

"""Launches one config for a profiler to look at: one JSON object {shape, config} is the argument, or {request, config}
of an autotuned kernel.

Only what runs between the profiler's start and stop is counted, whatever the kernels are called; inputs and the first
launch, which compiles, are made before.
"""

import functools
import json
import sys
from typing import Any

import torch

from blocktune.kernels.base.kernel import Launch, Thunk
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.drop_in.request import LaunchRequest
from blocktune.tuner.launches.launches import ConfigLaunch


def main() -> None:
    """Launch the config of the command line twice, the second time in the profiler's sight."""
    task = json.loads(sys.argv[1])
    if "request" in task:
        with LaunchRequest.from_json(task["request"]).open_call() as call:
            launch = ConfigLaunch(call, LaunchConfig.from_json(task["config"]))
            _launch_twice(launch, launch.before)
        return
    shape, config = AttentionShape.from_json(task["shape"]), KernelConfig.from_json(task["config"])
    _launch_twice(bind_random(shape, get_kernel(config.kernel).bind(config, shape)))


def _launch_twice(launch: Thunk, before: Thunk = lambda: None) -> None:
    """Launch out of the profiler's sight, then in it; what comes before a launch is never in it."""
    before()
    launch()
    before()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    launch()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def bind_random(shape: AttentionShape, launch: Launch) -> "functools.partial[None]":
    """Return a launch with random inputs. The values of a backward's output and log-sum-exp do not matter."""
    rows, keys = (shape.batch, shape.num_heads, shape.seqlen_q), (shape.batch, shape.num_heads_kv, shape.seqlen_k)

    def normal(*sizes: int) -> Any:
        return torch.randn(*sizes, device="cuda").to(getattr(torch, shape.dtype))

    q, k, v = normal(*rows, shape.head_dim), normal(*keys, shape.head_dim), normal(*keys, shape.head_dim_v)
    out, scale = normal(*rows, shape.head_dim_v), shape.head_dim**-0.5
    if shape.direction is Direction.FORWARD:
        return functools.partial(launch, q, k, v, out, None, scale)
    lse, gradients = torch.zeros(rows, device="cuda"), [torch.empty_like(tensor) for tensor in (q, k, v)]
    return functools.partial(launch, q, k, v, out, lse, normal(*rows, shape.head_dim_v), *gradients, scale)


if __name__ == "__main__":
    main()

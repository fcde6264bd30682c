"""FlashAttention-3's backward of 128 columns, by its binding for JAX: the time of its kernels next to that of ours."""

import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from blocktune.kernels.values.errors import UsageError
from tools.bench.drawn_peers.problem import Problem, Run

WIDTH = 128
ROUNDS = 9
FLUSH_BYTES = 160 << 20

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the memory


def missing_reason() -> str | None:
    """Return why it cannot be had at all; None where it can."""
    try:
        import flash_attn3_jax.flash  # noqa: F401
        import jax

        jax.devices("gpu")
    except (ImportError, OSError, RuntimeError) as error:
        return f"FlashAttention-3's backward cannot be had: {error}"
    return None


def backward_run(problem: Problem) -> Run:
    """Return the backward, which runs on a stream of JAX and is waited for.

    Raises:
        UsageError: it does not compute such problems.
    """
    shape = problem.shape
    if shape.features.varlen or {shape.head_dim, shape.head_dim_v} != {WIDTH}:
        raise UsageError("FlashAttention-3's backward is timed of 128 columns, and not of packed sequences.")
    import jax
    from flash_attn3_jax.flash import _flash_mha_bwd

    tensors = problem.query, problem.key, problem.value
    options = problem.scale, problem.is_causal and not shape.features.window, problem.sides
    given = [jax.dlpack.from_dlpack(tensor) for tensor in (problem.dout, *tensors, *_forward(problem))]
    backward = jax.jit(lambda *arrays: _flash_mha_bwd(*arrays, *options))

    def run() -> tuple[Tensor, ...]:
        return tuple(map(torch.from_dlpack, jax.block_until_ready(backward(*given))))

    return run


def _forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp [batch, heads, length]."""
    left, right = problem.sides
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        problem.query, problem.key, problem.value, None, None, problem.shape.seqlen_q, problem.shape.seqlen_k, 0.0,
        problem.is_causal, False, scale=problem.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    torch.cuda.synchronize()
    return out, lse


def kernel_times_us(ours: Run, theirs: Run) -> tuple[float, float]:
    """Return the mean time of the kernels of our backward and of theirs, in turns, with a cold L2 cache each.

    Ours are on the stream of the launches that overwrite the cache, theirs on others.

    Raises:
        UsageError: the profiler has not seen the kernels of one of the two.
    """
    buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def flush() -> None:
        buffer.add_(1)  # no memset, which a backward may launch as well

    flushes = _traced(flush)
    names, streams = ({event[key] for event in flushes} for key in ("name", "stream"))

    def rounds() -> None:
        for _ in range(ROUNDS):
            for run in random.sample((ours, theirs), 2):
                flush()
                torch.cuda.synchronize()
                run()
                torch.cuda.synchronize()

    found = _traced(rounds)
    mine = [event for event in found if event["stream"] in streams and event["name"] not in names]
    other = [event for event in found if event["stream"] not in streams]
    if not flushes or not mine or not other:
        raise UsageError("PyTorch's profiler has not seen the kernels of both backwards.")
    return sum(event["us"] for event in mine) / ROUNDS, sum(event["us"] for event in other) / ROUNDS


def _traced(work: Callable[[], Any]) -> list[Mapping[str, Any]]:
    """Return what ran on the GPU: names, streams and microseconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return [
        {"name": event.name, "stream": event.device_resource_id, "us": event.time_range.elapsed_us()}
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]

"""How fast ranks share attention, next to one of them alone and to PyTorch's context parallelism.

From the root of the repository, with as many processes as there are GPUs:

    PYTHONPATH=. python -m torch.distributed.run --standalone --nproc-per-node 4 \
        -m tests.support.programs.parallel_bench --seconds 110 [--out FILE]

It first compares small calls with float64 on one device, then measures bf16 with 32 query heads of 128 over 8 key
heads: each length and schedule, a causal forward and a forward with backward, and a window of 4096 over 65536 tokens a
rank. Rates count the FLOP of causal attention; `of_alone` is the rate over ranks times the rate of one GPU alone. What
does not fit into the time is left out, and said. Rank 0 prints one JSON object a line, and a summary at the end.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from blocktune import attention, context_parallel_attention
from blocktune.kernels.parallel.plan.blocks import Sight
from blocktune.kernels.parallel.plan.cost import Schedule, fastest, machine_of, time_s
from blocktune.kernels.parallel.plan.layout import SequenceLayout
from blocktune.kernels.parallel.plan.schedule import Problem, possible
from tests.support.parallel_cases import Case, errors

HEADS, HEADS_KV, DIM = 32, 8, 128
WINDOW, WINDOW_LENGTH = 4096, 65536
PYTORCH = "torch context_parallel"
BACKWARD = 3.5
"""FLOP of forward and backward, in forwards."""


@dataclass
class Bench:
    """The time that is left, what was measured, and the rate of one GPU alone by direction."""

    deadline: float
    device: torch.device
    length_alone: int

    def __post_init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.alone: dict[str, float] = {}

    def tell(self, **row: Any) -> None:
        """Print a measurement on rank 0, and keep it."""
        if dist.get_rank() == 0:
            self.rows.append(row)
            print(json.dumps(row), flush=True)

    def has(self, seconds: float) -> bool:
        """Tell whether this much time is left on all ranks."""
        left = torch.tensor([self.deadline - time.monotonic()], device=self.device)
        dist.all_reduce(left, dist.ReduceOp.MIN)
        return float(left) > seconds


def tensors(length: int, device: torch.device) -> list[Tensor]:
    """Return queries, keys and values of a rank, [1, heads, length, dim], in the memory order of projections."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [
        torch.randn(1, length, heads, DIM, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (HEADS, HEADS_KV, HEADS_KV)
    ]


def step(
    attend: Callable[..., Any], leaves: list[Tensor], direction: str, within: Callable[[], Any] = nullcontext
) -> None:
    """Run a forward, or a forward and its backward."""
    with within(), torch.no_grad() if direction == "forward" else nullcontext():
        out = attend(*leaves)
        if direction == "both":
            torch.autograd.grad(out, leaves, torch.ones_like(out))


def seconds(run: Callable[[], None], device: torch.device, *, together: bool = True) -> float:
    """Return the time of one run after a first one, on the slowest rank."""
    settle = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)

    def timed(repeats: int) -> float:
        settle()
        if together:
            dist.barrier()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        settle()
        spent = torch.tensor([(time.perf_counter() - begin) / repeats], device=device)
        if together:
            dist.all_reduce(spent, dist.ReduceOp.MAX)
        return float(spent)

    first = timed(1)
    if first > 5.0:
        return first  # long enough that compiling does not count
    once = timed(1)
    return min(once, timed(max(1, min(10, int(0.5 / once)))))


def flop(length: int, direction: str, window: int | None = None) -> float:
    """Return the FLOP of causal attention over a whole sequence."""
    pairs = length * (length + 1) / 2
    if window is not None and window < length:
        pairs -= (length - window - 1) * (length - window) / 2
    return 4 * DIM * HEADS * pairs * (BACKWARD if direction == "both" else 1.0)


def problem(length: int, ranks: int, window: float = float("inf")) -> Problem:
    """Return what the model is told of a call."""
    return Problem(
        batch=1, num_heads=HEADS, num_heads_kv=HEADS_KV, head_dim=DIM, head_dim_v=DIM, element_bytes=2,
        sight=Sight(window, 0, (0, length)), layout=SequenceLayout.zigzag(length, ranks),
    )  # fmt: skip


def check(bench: Bench) -> None:
    """Compare small calls with float64 on one device."""
    ranks = dist.get_world_size()
    plain = Case(ranks=ranks, schedule="ring", seqlen=1037, heads=(8, 4), dims=(64, 64), dtype="bfloat16", causal=True)
    if bench.device.type == "cpu":
        plain = replace(plain, seqlen=41, heads=(8, 4), dims=(8, 8))
    last = plain.seqlen
    cases = {
        "causal": plain,
        "full": replace(plain, causal=False),
        "window": replace(plain, window=(last // 9, -1)),
        "packed": replace(plain, packed=(0, last // 7, last // 2, last)),
        "sinks and softcap": replace(plain, sinks=True, softcap=4.0),
        "deterministic": replace(plain, deterministic=True, lse=False),
    }
    schedules = [schedule for schedule in Schedule if schedule in possible(problem(1024, ranks))]
    for name, case in cases.items():
        for schedule in schedules:
            found = errors(replace(case, schedule=str(schedule)), dist.group.WORLD, str(bench.device))
            worst = torch.tensor([max(found.values())], device=bench.device)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            bench.tell(kind="error", case=name, schedule=str(schedule), worst_of_largest=round(float(worst), 6))


def measure_alone(bench: Bench, direction: str) -> None:
    """Measure one GPU while the others wait."""
    rate = torch.zeros(1, device=bench.device, dtype=torch.float64)
    if dist.get_rank() == 0:
        leaves, length = tensors(bench.length_alone, bench.device), bench.length_alone
        attend = partial(attention, is_causal=True, enable_gqa=True)
        spent = seconds(lambda: step(attend, leaves, direction), bench.device, together=False)
        rate[0] = flop(length, direction) / spent
    dist.broadcast(rate, 0)
    bench.alone[direction] = float(rate)
    bench.tell(kind="alone", direction=direction, length=bench.length_alone, tflops=round(float(rate) / 1e12, 1))


def measure(
    bench: Bench,
    name: str,
    attend: Callable[..., Any],
    length: int,
    direction: str,
    within: Callable[[], Any] = nullcontext,
    **more: Any,
) -> None:
    """Measure ranks together, if there is time for it. within: makes the context of each run."""
    ranks, window = dist.get_world_size(), more.get("window")
    work = flop(length, direction, window)
    expected_s = work / ranks / bench.alone[direction]
    kind = {"kind": "together", "name": name, "length": length, "direction": direction, **more}
    if not bench.has(4 * expected_s + 2):
        bench.tell(**kind, left_out="no time left")
        return
    leaves = tensors(length // ranks, bench.device)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        spent = seconds(lambda: step(attend, leaves, direction, within), bench.device)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        bench.tell(**kind, left_out=str(error).splitlines()[0][:200])
        return
    peak = torch.cuda.max_memory_allocated() / 2**30 if bench.device.type == "cuda" else 0.0
    rate = work / spent
    bench.tell(
        **kind, ranks=ranks, ms=round(spent * 1e3, 3), tflops_a_rank=round(rate / ranks / 1e12, 1),
        of_alone=round(rate / ranks / bench.alone[direction], 3), peak_gib=round(peak, 2),
    )  # fmt: skip


def measure_all(bench: Bench, lengths: list[int]) -> None:
    """Measure every length with every schedule, PyTorch's own, and the window."""
    ranks = dist.get_world_size()
    machine = machine_of(bench.device)
    for length in lengths:
        own = problem(length, ranks)
        alone_s = time_s(problem(length, 1), Schedule.RING, machine)
        for schedule in possible(own):
            predicted = round(alone_s / ranks / time_s(own, schedule, machine), 3)
            attend = partial(context_parallel_attention, is_causal=True, schedule=str(schedule))
            for direction in ("forward", "both"):
                measure(bench, str(schedule), attend, length, direction, model=predicted)
        bench.tell(kind="choice", length=length, schedule=str(fastest(own, machine)))
        for direction in ("forward", "both"):
            measure_pytorch(bench, length, direction)
    for layout in ("zigzag", "contiguous"):
        attend = partial(context_parallel_attention, is_causal=True, window=(WINDOW, -1), layout=layout)
        length = min(WINDOW_LENGTH, lengths[0]) * ranks
        measure(bench, f"window {layout}", attend, length, "forward", window=WINDOW)


def measure_pytorch(bench: Bench, length: int, direction: str) -> None:
    """Measure torch.distributed.tensor.experimental.context_parallel, where it runs."""
    if bench.device.type != "cuda":
        return
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    attend = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    measure(bench, PYTORCH, attend, length, direction, within=lambda: context_parallel(mesh))


def summary(bench: Bench) -> None:
    """Print one line a length and direction: the best schedule, against n GPUs alone and against PyTorch."""
    rows = [row for row in bench.rows if row["kind"] == "together" and "ms" in row]
    for length, direction in dict.fromkeys((row["length"], row["direction"]) for row in rows):
        own = [row for row in rows if (row["length"], row["direction"]) == (length, direction)]
        ours = [row for row in own if row["name"] in tuple(Schedule)]
        theirs = [row for row in own if row["name"] == PYTORCH]
        if ours:
            best = min(ours, key=lambda row: row["ms"])
            against = f", {theirs[0]['ms'] / best['ms']:.3f} times as fast as PyTorch's" if theirs else ""
            print(f"{length} {direction}: {best['name']} at {best['of_alone']} of {best['ranks']} alone{against}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 262144, 1048576])
    parser.add_argument("--length-alone", type=int, default=262144)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    bench = Bench(time.monotonic() + options.seconds, device, options.length_alone)
    check(bench)
    for direction in ("forward", "both"):
        measure_alone(bench, direction)
    measure_all(bench, sorted(options.lengths))
    if dist.get_rank() == 0:
        summary(bench)
        if options.out is not None:
            options.out.write_text(json.dumps(bench.rows, indent=1) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

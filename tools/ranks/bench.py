"""How fast ranks share attention, next to one of them alone and to PyTorch's context parallelism.

From the root of the repository, with as many processes as there are GPUs:

    PYTHONPATH=. python -m tools.ranks.warm 4        # compiles what follows, in parallel
    PYTHONPATH=. python -m torch.distributed.run --standalone --nproc-per-node 4 \
        -m tools.ranks.bench --seconds 110 --out results/h200-x4.parallel.json

Parts, in this order unless --parts names some: `check` compares small calls with float64 on one device, `rivals` those
of PyTorch, which without it are not timed, `link` times messages, `alone` one GPU, `together` every length and schedule
of all ranks and of two of them, a causal forward and one with backward, bf16 with 32 query heads of 128 over 8 key
heads; `window` a window of 4096 over 65536 tokens a rank, `decode` one query over a cache of a million rows,
`head_start` a ring whose messages get none, and `trace` says what the streams of a rank do. Rates count the FLOP of
causal attention; `of_alone` is the rate over ranks times the rate of one GPU alone. What does not fit into the time
is left out, and said. Each row is written when it is there; rank 0 prints one JSON object a line.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from blocktune import attention, context_parallel_attention, context_parallel_decode, flash_attn_with_kvcache
from blocktune.runtime.parallel import ring
from blocktune.runtime.parallel.plan.schedule import Schedule, possible
from tests.support.attention.stream_trace import totals, traced
from tests.support.ranks import rivals
from tests.support.ranks.cases import Case, errors
from tests.support.ranks.long_calls import measure_long
from tests.support.ranks.measures import Bench, Way, agreed, measure_in_turns, rated, seconds, step, tensors, timed_row
from tests.support.ranks.problems import DIM, HEADS, HEADS_KV, check_cases, flop, problem

WINDOW, WINDOW_LENGTH = 4096, 65536
CACHE_ROWS = 1 << 20
QUERIES = 50
"""That follow each other, as those of a text do."""
LINK_BYTES = (1 << 26, 1 << 10)
PATIENCE_S = 60
LONG = 1 << 19
"""Tokens from which a run takes seconds, and what matters most is measured first."""
PARTS = ("check", "rivals", "link", "alone", "together", "head_start", "trace", "window", "decode")
MESH, ALONE = "ring on a mesh", "own tokens alone"


def check(bench: Bench) -> None:
    """Compare small calls with float64 on one device."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    for name, case in check_cases(ranks, bench.device.type):
        if bench.table is None and case.columns > 1:
            continue
        worst = max(errors(case, bench.table if case.columns > 1 else group, str(bench.device)).values())
        schedule = MESH if case.columns > 1 else case.schedule
        bench.tell(
            kind="error", case=name, schedule=schedule, ranks=ranks,
            worst_of_largest=round(agreed(worst, dist.ReduceOp.MAX), 6),
        )  # fmt: skip
    check_alone(bench, replace(case, columns=1, schedule="ring"))


def check_alone(bench: Bench, case: Case) -> None:
    """Compare one GPU with float64, in a group of its own."""
    group, _ = bench.groups[1]
    found = errors(replace(case, ranks=1), group, str(bench.device)) if dist.get_rank() == 0 else {"": 0.0}
    bench.tell(kind="error", case="causal", schedule="one GPU", ranks=1, worst_of_largest=round(max(found.values()), 6))


def check_rivals(bench: Bench) -> None:
    """Compare PyTorch's ways with float64; those that compute the last of the checks are measured."""
    *_, (_, last) = check_cases(dist.get_world_size(), bench.device.type)
    case = replace(last, columns=1)
    for backend in rivals.BACKENDS if bench.device.type == "cuda" else ():
        for grouped in (True, False):
            if backend in bench.rival:
                continue
            row = {"kind": "error", "case": "causal", "schedule": rivals.name_of(backend, grouped=grouped)}
            try:
                with rivals.context_parallel_of(bench.groups[dist.get_world_size()][1], backend):
                    attend = partial(rivals.attend, grouped=grouped)
                    worst = max(errors(case, dist.group.WORLD, str(bench.device), attend).values())
            except rivals.FAILURES as error:
                bench.tell(**row, ranks=case.ranks, left_out=f"{type(error).__name__}: {error}".splitlines()[0][:200])
                continue
            bench.tell(**row, ranks=case.ranks, worst_of_largest=round(agreed(worst, dist.ReduceOp.MAX), 6))
            bench.rival[backend] = rivals.name_of(backend, grouped=grouped), grouped


def measure_link(bench: Bench) -> None:
    """Time messages around the ring."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for size in LINK_BYTES:
        out, into = (torch.zeros(size, dtype=torch.uint8, device=bench.device) for _ in range(2))

        def exchange(out: Tensor = out, into: Tensor = into) -> None:
            ways = dist.P2POp(dist.isend, out, (rank + 1) % ranks), dist.P2POp(dist.irecv, into, (rank - 1) % ranks)
            for work in dist.batch_isend_irecv(list(ways)):
                work.wait()

        spent = seconds(exchange, bench.device, None)
        bench.tell(
            kind="link", name=f"{size} bytes", ranks=ranks, us=round(spent * 1e6, 1), gbs=round(size / spent / 1e9, 1)
        )


def measure_alone(bench: Bench) -> None:
    """Measure one GPU while the others wait, then all at once, each on as many tokens of its own."""
    attend, length = partial(attention, is_causal=True, enable_gqa=True), bench.length_alone
    for direction in ("forward", "both"):
        run, rate = partial(step, attend, tensors(length, bench.device), direction), 0.0
        if dist.get_rank() == 0:
            rate = flop(length, direction) / seconds(run, bench.device, bench.groups[1][0])
        bench.alone[direction] = agreed(rate, dist.ReduceOp.MAX)
        tell_alone(bench, 1, direction, length, flop(length, direction) / bench.alone[direction])
        tell_alone(bench, dist.get_world_size(), direction, length, seconds(run, bench.device, None))


def tell_alone(bench: Bench, ranks: int, direction: str, length: int, spent_s: float) -> None:
    """Keep the time of so many ranks that each attend to their own tokens."""
    cells = {"ms": round(spent_s * 1e3, 3)}
    row = {"kind": "alone", "ranks": ranks, "direction": direction, "length": length}
    bench.tell(**row, **rated(bench, cells, flop(length, direction), direction))


def measure_together(bench: Bench, lengths: list[int], sizes: list[int]) -> None:
    """Measure every length of so many ranks."""
    for length in lengths:
        for size in sizes:
            measure_length(bench, size, length)


def measure_length(bench: Bench, ranks: int, length: int) -> None:
    """Measure one length: of a long one without heads for tokens, and a row is kept after each run."""
    ways = ours(bench, ranks, length) | theirs(bench, ranks)
    if length < LONG:
        for direction in ("forward", "both"):
            measure_in_turns(bench, ways, ranks, length, direction)
        return
    ways.pop(Schedule.ULYSSES, None)
    measure_long(bench, dict(reversed(ways.items())), ranks, length)


def ours(bench: Bench, ranks: int, length: int) -> dict[str, Way]:
    """Return our schedules: what attends, and where it is called."""
    schedules = [one for one in possible(problem(length, ranks)) if ranks > 2 or one is not Schedule.ALL_GATHER]
    group = bench.groups[ranks][0]  # of two ranks the gather is the ring
    found: dict[str, Way] = {
        str(one): (partial(context_parallel_attention, is_causal=True, schedule=str(one), group=group), nullcontext)
        for one in schedules
    }
    if bench.table is not None and ranks == dist.get_world_size() and length < LONG:
        options = {"is_causal": True, "schedule": str(Schedule.RING), "group": bench.table}
        found[MESH] = partial(context_parallel_attention, **options), nullcontext
    return found


def theirs(bench: Bench, ranks: int) -> dict[str, Way]:
    """Return PyTorch's ways that compute such calls; of long sequences only the first."""
    mesh = bench.groups[ranks][1]
    within = {backend: partial(rivals.context_parallel_of, mesh, backend) for backend in bench.rival}
    within = within if dist.get_rank() < ranks else dict.fromkeys(bench.rival, nullcontext)
    return {
        name: (partial(rivals.attend, grouped=grouped), within[backend])
        for backend, (name, grouped) in list(bench.rival.items())[:1]
    }


def measure_window(bench: Bench) -> None:
    """Measure a window over equally many tokens a rank, of one rank and of more. Those take turns with GPUs that attend
    to their own tokens alone, all at once: a GPU that works beside others is slower than one that has rested."""
    for ranks in bench.groups:
        each, ways = min(WINDOW_LENGTH, bench.length_alone), dict[str, Way]()
        options = {"is_causal": True, "window": (WINDOW, -1)}
        for layout in ("contiguous", "zigzag") if ranks > 1 else ("contiguous",):
            within = options | {"layout": layout, "group": bench.groups[ranks][0]}
            ways[layout] = partial(context_parallel_attention, **within), nullcontext
        if ranks > 1:
            ways[ALONE] = partial(context_parallel_attention, **options, group=bench.own), nullcontext
        for direction in ("forward", "both"):
            measure_in_turns(bench, ways, ranks, each * ranks, direction, window=WINDOW)


def measure_decode(bench: Bench) -> None:
    """Measure one query over a cache that ranks share, and over a rank's own rows alone."""
    total = CACHE_ROWS if bench.device.type == "cuda" else 1 << 10
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    for ranks, (group, _) in bench.groups.items():
        size = (1, total // ranks, HEADS_KV, DIM)
        query = torch.randn(1, 1, HEADS, DIM, device=bench.device, dtype=dtype)
        tensors = query, *(torch.randn(size, device=bench.device, dtype=dtype) for _ in range(2))
        ways = {
            "one query": partial(context_parallel_decode, *tensors, group=group),
            "own rows": partial(flash_attn_with_kvcache, *tensors, return_softmax_lse=True),
        }
        for name, run in ways.items():
            told: dict[str, Any] = {}
            if dist.get_rank() < ranks:
                told = timed_row(bench, partial(seconds, run, bench.device, group, repeats=QUERIES))
            bench.tell(kind="decode", name=name, ranks=ranks, length=total, **told)


def trace(bench: Bench, lengths: list[int]) -> None:
    """Say what the streams of rank 0 do."""
    if bench.device.type != "cuda":
        return
    ranks = dist.get_world_size()
    attend = partial(context_parallel_attention, is_causal=True, schedule="ring", group=bench.groups[ranks][0])
    for length in [length for length in lengths if length < LONG]:
        leaves = tensors(length // ranks, bench.device)
        for direction in ("forward", "both"):
            run = partial(step, attend, leaves, direction)
            run()
            agreed(0.0, dist.ReduceOp.MAX)
            events = traced(run)
            row = {"kind": "trace", "name": "ring", "ranks": ranks, "length": length, "direction": direction}
            bench.tell(**row, streams=totals(events), events=events[:120])


def measure_head_start(bench: Bench, lengths: list[int]) -> None:
    """Measure a ring whose messages begin when they can, beside one that lets them begin."""
    ranks, own = dist.get_world_size(), ring.HEAD_START_CYCLES
    options = {"is_causal": True, "schedule": str(Schedule.RING), "group": bench.groups[ranks][0]}
    for length in [length for length in lengths if length < LONG]:
        for cycles in (own, 0, own, 0):
            ring.HEAD_START_CYCLES = cycles
            run = partial(step, partial(context_parallel_attention, **options), tensors(length // ranks, bench.device))
            forward = partial(run, "forward")
            told = timed_row(bench, partial(seconds, forward, bench.device, bench.groups[ranks][0]))
            bench.tell(kind="head start", name=str(cycles), ranks=ranks, length=length, direction="forward", **told)
    ring.HEAD_START_CYCLES = own


def make_groups() -> dict[int, tuple[Any, DeviceMesh]]:
    """Return the groups of the first one, two and all ranks."""
    ranks, kind = dist.get_world_size(), "cuda" if torch.cuda.is_available() else "cpu"
    sizes = sorted({1, min(2, ranks), ranks})
    return {size: (dist.new_group(list(range(size))), DeviceMesh(kind, torch.arange(size))) for size in sizes}


def own_group() -> Any:
    """Return the group of this rank alone."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 262144, 1048576])
    parser.add_argument("--length-alone", type=int, default=262144)
    parser.add_argument("--parts", nargs="+", default=PARTS)
    parser.add_argument(
        "--together", type=int, nargs="+", default=[], help="of how many ranks; two and all if not given"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=PATIENCE_S))
    ranks = dist.get_world_size()
    table = DeviceMesh(device.type, torch.arange(ranks).view(2, -1)) if ranks >= 4 and ranks % 2 == 0 else None
    deadline = time.monotonic() + options.seconds
    bench = Bench(deadline, device, options.length_alone, options.out, make_groups(), own_group(), table)
    lengths = sorted(options.lengths)
    parts: dict[str, Callable[[], None]] = {
        "check": lambda: check(bench),
        "rivals": lambda: check_rivals(bench),
        "link": lambda: measure_link(bench),
        "alone": lambda: measure_alone(bench),
        "together": lambda: measure_together(
            bench, lengths, options.together or list(dict.fromkeys((ranks, min(2, ranks))))
        ),
        "window": lambda: measure_window(bench),
        "decode": lambda: measure_decode(bench),
        "head_start": lambda: measure_head_start(bench, lengths),
        "trace": lambda: trace(bench, lengths),
    }
    for part in options.parts:
        begin = time.monotonic()
        parts[part]()
        if dist.get_rank() == 0:
            print(f"{part}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

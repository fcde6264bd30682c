"""What Nsight Compute counts of the Hopper backwards and of FlashAttention-4's, shape by shape: which unit is busy, and
what warps wait for.

python -m tools.bench.backward_limits --out results/h200.backward-limits.table.json

One process launches everybody once under `ncu`, a launch of another kernel between them. Of the launches of a backward
the one that takes most of its time counts. Clocks stay as the driver sets them, and the caches are empty.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from blocktune.db.exchange.document import save_text
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.profile.comparison import ISSUE, TENSOR
from blocktune.tuner.profile.counters import TIME, Counters, LaunchCounters
from blocktune.tuner.profile.nsight_compute import CSV
from tests.support.ranks.document import new_document, table
from tools.bench.backward_peers import FLASH, Problem, Run, computes, contenders, shape_of
from tools.bench.defaults import compile_ahead

SHARED = ("l1tex__data_bank_reads", "l1tex__data_bank_writes")
L2, DRAM = "lts__t_sectors", "dram__throughput"
OF_PEAK = ".avg.pct_of_peak_sustained_elapsed"
METRICS = (TIME, TENSOR, ISSUE, *(f"{name}{OF_PEAK}" for name in (*SHARED, L2, DRAM)))
MAIN = ("flash_bwd_hopper", "flash_bwd_sm90")
"""In the names of our kernel and of FlashAttention-4's that take most of a backward's time."""
MARK = "erfinv"
"""In the name of the kernel that is launched ahead of every contender."""
NCU = (
    "ncu", "--profile-from-start", "off", "--clock-control", "none",
    "--kernel-name-base", "demangled", "--kernel-name", f"regex:{'|'.join((MARK, *MAIN))}",
    "--section", "WarpStateStats", "--metrics", ",".join(METRICS), *CSV,
)  # fmt: skip

CONTENDERS = {"default": "ours", FLASH: "FlashAttention-4"}
"""Who is looked at, by the names that tools/bench/backward_peers.py has for them."""
SHOWN_STALLS = 3

COLUMNS = (
    "shape", "whose", "kernel, µs", "tensor cores", "instructions", "shared memory", "L2", "DRAM", "warps wait for",
)  # fmt: skip
HOW = (
    "Nsight Compute, one launch with empty caches and the clock as the driver sets it. Units are busy for a share of "
    "the time of a backward's main kernel: shared memory with reads and writes of its banks, instructions with their "
    "issue. Waits are shares of all."
)


def shapes() -> Iterator[AttentionShape]:
    yield from (shape_of(256, 4096, causal) for causal in (True, False))
    yield from (shape_of(128, 4096, causal) for causal in (False, True))
    yield from (shape_of(64, 4096, causal) for causal in (False, True))
    yield replace(shape_of(192, 4096, True, batch=1, num_heads=16), head_dim_v=128)
    yield shape_of(192, 4096, True, num_heads=16)
    yield shape_of(128, 4096, True, "window=1023:-1")
    yield from (shape_of(128, seqlen, causal, "block_sparse") for seqlen, causal in ((4096, False), (8192, True)))
    yield from (shape_of(head_dim, 4096, True, "deterministic") for head_dim in (64, 256))
    yield shape_of(128, 8192, False, num_heads=16, num_heads_kv=1, batch=1)
    yield shape_of(128, 4000, False, batch=4)
    yield shape_of(128, 8192, True, "additive", batch=1)
    yield shape_of(128, 32768, True, batch=1)


def launched_contenders(shape: AttentionShape) -> Iterator[tuple[str, Run]]:
    """Give everybody that computes a shape, launched once."""
    found = contenders(Problem(shape))
    for name, whose in CONTENDERS.items():
        if name in found and computes(name, found[name]):
            yield whose, found[name]


def launch_all(seconds: float) -> None:
    """Launch every contender of every shape, the second time in the profiler's sight."""
    mark, end = torch.zeros(1, device="cuda"), time.monotonic() + seconds
    for shape in shapes():
        if time.monotonic() > end:
            break
        for whose, run in launched_contenders(shape):
            print(json.dumps([shape.label, whose]), flush=True)
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.erfinv(mark)
            run()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def read_profile(text: str) -> Iterator[tuple[list[str], list[LaunchCounters]]]:
    """Yield (label of the shape, whose) and the launches, of what ncu and the launching process print."""
    names = [json.loads(line) for line in text.splitlines() if line.startswith('["')]
    groups: list[list[LaunchCounters]] = []
    for launch in Counters.parse(text).launches:
        if MARK in launch.kernel:
            groups.append([])
        else:
            groups[-1].append(launch)
    yield from zip(names, groups, strict=True)


def cells(names: Sequence[str], launches: Sequence[LaunchCounters]) -> list[str]:
    """Return a row of the table."""
    longest = max(launches, key=lambda launch: launch.metrics[TIME])
    time_us, counted = longest.metrics[TIME], longest.metrics
    shared = sum(counted[f"{name}{OF_PEAK}"] for name in SHARED)
    units = (counted[TENSOR], counted[ISSUE], shared, counted[f"{L2}{OF_PEAK}"], counted[f"{DRAM}{OF_PEAK}"])
    return [*names, f"{time_us:,.0f}", *(f"{unit:.0f} %" for unit in units), waits(longest)]


def waits(launch: LaunchCounters) -> str:
    """Return the reasons that warps waited for most, with their shares."""
    reasons = {name: value for name, value in Counters((launch,)).stalls().items() if name != "selected"}
    whole = sum(reasons.values())
    return ", ".join(
        f"{name.replace('_', ' ')} {100 * reasons[name] / whole:.0f} %" for name in list(reasons)[:SHOWN_STALLS]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the file; without it everybody is launched, for ncu to look at")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which no shape is begun")
    asked = parser.parse_args()
    if asked.out is None:
        launch_all(asked.seconds)
        return
    compile_ahead(shapes())
    command = [*NCU, sys.executable, "-P", "-m", "tools.bench.backward_limits", f"--seconds={asked.seconds}"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    rows = [cells(names, launches) for names, launches in read_profile(said)]
    document = table(new_document(torch.device("cuda")), HOW, COLUMNS, rows)
    save_text(json.dumps(document, indent=1, sort_keys=True) + "\n", asked.out)


if __name__ == "__main__":
    main()

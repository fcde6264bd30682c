"""`python -P -m tools.bench.drawn_peers`: times drawn shapes next to every peer on a GPU.

    python -P -m tools.bench.drawn_peers --seed 1 --seconds 570 --jobs 14 --out results/h200.drawn-peers.table.json

Kernels are compiled ahead by several processes; then one process times alone. A row is written once it is measured.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.bench.drawn_peers import flash3_backward
from tools.bench.drawn_peers.ahead import COMPILED, compile_ahead
from tools.bench.drawn_peers.apart import MeasuringProcess
from tools.bench.drawn_peers.draw import drawn_cells
from tools.bench.drawn_peers.peers import FA3, OTHERS, missing_reason
from tools.bench.drawn_peers.record import Record

COMPILE_SHARE = 0.42
"""Of the time, at most, for compiling ahead."""

LATE = "not compiled within the time"

os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the processes: FlashAttention-4's compiler has pages of them


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a cell has an error."""
    options = _options().parse_args(arguments)
    end = time.monotonic() + options.seconds
    missing = {name: reason for name in options.peers if (reason := missing_reason(name))}
    peers = [name for name in options.peers if name not in missing]
    if FA3 in options.peers and (reason := flash3_backward.missing_reason()):
        missing["fa3 backward"] = reason
    for name, reason in missing.items():
        print(f"{name} takes no part: {reason}", flush=True)
    cells = drawn_cells(options.seed, options.cases)
    record = Record(options.out, seed=options.seed, drawn=len(cells), peers=peers, missing=missing)
    began = time.monotonic()
    ready = compile_ahead(cells, peers, options.jobs, options.seconds * COMPILE_SHARE)
    print(f"{len(ready)} compiled in {time.monotonic() - began:.0f} s", flush=True)
    with MeasuringProcess() as process:
        for number, cell in enumerate(cells):
            if time.monotonic() > end:
                break
            late = {name: LATE for name in COMPILED if name in peers and (number, name) not in ready}
            row = process.row(cell, peers, late)
            record.add(row)
            print(_line(row), flush=True)
    _show(record.document["groups"])
    return 1 if any("error" in row for row in record.document["rows"]) else 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="drawn_peers", description="Drawn shapes next to every peer.")
    parser.add_argument("--seed", type=int, default=1, help="the same seed draws the same shapes")
    parser.add_argument("--seconds", type=float, default=570.0, help="how long to go on, compiling included")
    parser.add_argument("--cases", type=int, default=200, help="how many shapes are drawn")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile ahead")
    parser.add_argument("--peers", nargs="+", choices=OTHERS, default=list(OTHERS), help="who takes part")
    parser.add_argument("--out", type=Path, required=True, help="write the record there")
    return parser


def _line(row: Mapping[str, Any]) -> str:
    """Return a row in a line."""
    words = row.get("error") or " ".join(f"{name} {time_us:.1f}" for name, time_us in row["times_us"].items())
    over = f"{row['ratio']:.3f} of {row['fastest']}, " if "ratio" in row else ""
    refused = f"; without {', '.join(row['refused'])}" if row["refused"] else ""
    return f"{row['group']}: {row['label']}: {over}{words}{refused}"


def _show(groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the summary of each group."""
    for name, found in groups.items():
        means = "" if "mean" not in found else f"mean {found['mean']:.3f}, least {found['least']:.3f}, "
        print(f"{name:34} {means}" + ", ".join(f"{found[key]} {key}" for key in found if key not in ("mean", "least")))


if __name__ == "__main__":
    sys.exit(main())

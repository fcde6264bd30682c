"""`python -P -m tools.differential.speed`: times drawn calls next to PyTorch's own attention and names slower ones.

Kernels are compiled ahead by several processes; then one process times alone.
"""

import argparse
import json
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from blocktune.cli.output.json_files import write_atomically
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.dispatch.dispatcher import attention
from blocktune.runtime.selection.pytorch_rival import FORMAT, SCHEMA
from blocktune.tuner.measure.clock import CudaClock
from blocktune.tuner.measure.environment import source_commit
from tools.differential.speed.ahead import compile_ahead
from tools.differential.speed.cases import GROUPS, SpeedCase, drawn_cases
from tools.differential.speed.timing import time_case

COMPILE_SHARE = 0.6
"""Of the time, at most, for compiling ahead."""


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a call was slower than PyTorch's."""
    options = _options().parse_args(arguments)
    end = time.monotonic() + options.seconds
    cases = drawn_cases(options.seed, options.cases)
    ready = compile_ahead(cases, options.jobs, options.seconds * COMPILE_SHARE, kernels=options.kernels)
    records = time_all(ready, end, kernels=options.kernels)
    run = {
        "seed": options.seed,
        "drawn": len(cases),
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": source_commit(),
    }
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "runs": [run],
        "cases": records,
    }
    if options.out:
        write_atomically(options.out, json.dumps(document, indent=1) + "\n")
    show(records)
    return 1 if any(record["slower"] for record in records) else 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="speed", description="Drawn calls next to PyTorch's own attention.")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long to go on")
    parser.add_argument("--cases", type=int, default=300, help="how many cases are drawn")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile ahead")
    parser.add_argument("--seed", type=int, default=1, help="the same seed draws the same cases")
    parser.add_argument("--kernels", action="store_true", help="our kernels serve all calls, for the record that ships")
    parser.add_argument("--out", type=Path, help="write the record there")
    return parser


def time_all(cases: list[SpeedCase], end: float, *, kernels: bool) -> list[dict[str, Any]]:
    """Return the records of the cases that are timed until the end."""
    clock, records = CudaClock(), []
    for case in cases:
        if time.monotonic() > end:
            break
        record = {
            "label": case.label,
            "group": case.group,
            "shape": case.shape.to_json(),
            "kernel": serving_kernel(case.shape),
            **time_case(case, clock, kernels=kernels).to_json(),
        }
        records.append(record)
        if record["slower"] or record["host_slower"]:
            print(_line(record), flush=True)
    return records


def serving_kernel(shape: AttentionShape) -> str:
    """Return the name of our kernel that serves a shape, or none."""
    config = attention.explain(shape).config
    return "" if config is None else config.kernel


def show(records: list[dict[str, Any]]) -> None:
    """Print means by group, of PyTorch's time over ours, and how many are slower."""
    for group in GROUPS:
        own = [record for record in records if record["group"] == group and not record["error"]]
        if not own:
            continue
        mean = statistics.geometric_mean(1 / record["ratio"] for record in own)
        least = min(1 / record["ratio"] for record in own)
        slower, host = (sum(record[name] for record in own) for name in ("slower", "host_slower"))
        print(f"{group:12} {len(own):4} cases, mean {mean:.3f}, least {least:.3f}, {slower} slower, {host} on the host")


def _line(record: dict[str, Any]) -> str:
    times = f"{record['ours_us']:.1f} / {record['pytorch_us']:.1f} us = {record['ratio']:.3f}"
    host = f"host {record['ours_host_us']:.1f} / {record['pytorch_host_us']:.1f} us"
    word = "slower" if record["slower"] else "host"
    return f"{word}: {record['label']}: {record['error'] or times}, {host}"


if __name__ == "__main__":
    sys.exit(main())

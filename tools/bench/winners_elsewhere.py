"""Winners of several devices, timed on the GPU that is here, in one run of finals a shape.

python -m tools.bench.winners_elsewhere FILE RESULTS RESULTS...

RESULTS are files that `tune export` wrote, one a device. Shapes count that all of them have a winner for that today's
kernels take; those that all won by the same config need no measuring. FILE is a rematch, as `tune lab rematch` keeps
it.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blocktune.cli.lab.noise_file import REMATCH_FORMAT, SCHEMA
from blocktune.cli.output.json_files import write_atomically
from blocktune.db.records.records import of_attention
from blocktune.db.sources import read_results
from blocktune.kernels.hardware.device import DeviceSpec, current_device
from blocktune.kernels.registry import competing
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.starting_configs import find_contenders
from blocktune.tuner.measure.environment import source_commit
from blocktune.tuner.measure.locked_runner import gpu_runner
from blocktune.tuner.measure.measurement import Terms
from blocktune.tuner.measure.protocol import DEFAULT_REGIME
from blocktune.tuner.measure.telemetry import GpuMonitor
from blocktune.tuner.search.run import farm_for
from blocktune.tuner.upkeep.agreement import rematch
from tools.lab.transfer import still_runs

Winners = Mapping[AttentionShape, Sequence[KernelConfig]]


def disagreements(places: Sequence[str]) -> Winners:
    """Return the winners of shapes that every place has one of, where they differ."""
    found: dict[AttentionShape, list[KernelConfig]] = {}
    for place in places:
        for best in of_attention(read_results(place, trials=False).bests):
            if still_runs(best):
                found.setdefault(best.shape, []).append(best.config)
    return {shape: won for shape, won in found.items() if len(won) == len(places) and len(set(won)) > 1}


def rows(winners: Winners, device: DeviceSpec) -> Iterator[dict[str, Any]]:
    defaults = {shape: find_contenders(shape, device, competing(), ()).default for shape in winners}
    terms, monitor = Terms(race=False), GpuMonitor(device.uuid, own_processes=1)
    with ExitStack() as stack:
        farm = stack.enter_context(farm_for(device))
        wanted = [(shape, config) for shape, won in winners.items() for config in {defaults[shape], *won}]
        compiles = [farm.submit(config.kernel, config, shape, device.limits.cc) for shape, config in wanted]
        runner = stack.enter_context(gpu_runner(next(iter(winners)), device, monitor, print, terms))
        runner.prepare()
        wait(compiles)
        for shape, won in winners.items():
            runner.turn_to(shape)
            found = rematch(won, defaults[shape], runner).to_json()
            yield {"label": shape.label, "shape": shape.to_json(), "regime": str(DEFAULT_REGIME)} | found


def main(file: Path, places: Sequence[str]) -> None:
    document: dict[str, Any] = {
        "format": REMATCH_FORMAT,
        "schema": SCHEMA,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": source_commit(),
        "device": current_device().name,
        "rows": [],
    }
    for row in rows(disagreements(places), current_device()):
        document["rows"].append(row)
        write_atomically(file, json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n")
        print(f"{row['label']}: {row['slowest']:.3f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

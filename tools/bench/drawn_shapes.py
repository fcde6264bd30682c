"""Draws shapes at random, searches them on a GPU, and times what a call gets untuned in the finals of the search.

python -m tools.bench.drawn_shapes SEED FILE [COUNT] [SECONDS]

Draws COUNT shapes (20) of all groups of `tools.bench.drawn_peers` and takes as many as fit SECONDS (600). Of each it
writes what a call gets before anything is tuned, what the search found, and their times in the rounds of its finals.
The search is that of `tune run` among the model's favourites, which are compiled for all shapes from the start.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from blocktune.cli.output.json_files import write_atomically
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import DeviceSpec, current_device
from blocktune.kernels.registry import competing
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.starting_configs import favourites, find_contenders
from blocktune.tuner.compile_server.background import Compiler
from blocktune.tuner.measure.device_choice import visible
from blocktune.tuner.measure.environment import source_commit
from blocktune.tuner.measure.measurement import Energies, Finals
from blocktune.tuner.measure.runner import GpuRunner
from blocktune.tuner.measure.telemetry import GpuMonitor, gpu_lock
from blocktune.tuner.search.report import Budget
from blocktune.tuner.search.run import farm_for
from blocktune.tuner.search.tune import tune
from blocktune.tuner.search.verdict import speedup
from blocktune.tuner.upkeep.agreement import RoundsByConfig
from tools.bench.drawn_peers.draw import drawn_cells
from tools.pages.searches.drawn_tables import FORMAT, SCHEMA

TRIALS = 16


def draw_shapes(seed: int, count: int) -> list[AttentionShape]:
    """Return the shapes that `tools.bench.drawn_peers` draws."""
    return [cell.shape for cell in drawn_cells(seed, count)]


class KeptFinals(GpuRunner):
    """A runner that remembers its last finals and measures no energy."""

    last: Finals

    def finals(self, configs: Any) -> Finals:
        self.last = super().finals(configs)
        return self.last

    def energies(self, configs: Any, rounds: int) -> Energies:
        del configs, rounds
        return Energies()


class Study:
    """Searches shapes one after the other on one GPU."""

    def __init__(self, device: DeviceSpec, store: ResultStore, farm: Compiler, runner: KeptFinals) -> None:
        self._device, self._store, self._farm, self._runner = device, store, farm, runner

    def row(self, shape: AttentionShape) -> dict[str, Any]:
        """Return what a shape gets untuned and tuned."""
        untuned = find_contenders(shape, self._device, competing(), ()).untuned
        began = time.monotonic()
        report = tune(
            shape,
            device=self._device,
            store=self._store,
            budget=Budget(trials=TRIALS),
            sampler="model",
            compiler=self._farm,
            runner=self._runner,
        )
        rounds = self._runner.last.samples_us
        winner = report.best.config
        return {
            "shape": shape.to_json() | {"label": shape.label},
            "untuned": untuned.to_json() | {"label": untuned.label, "time_us": median(rounds[untuned])},
            "tuned": winner.to_json() | {"label": winner.label, "time_us": median(rounds[winner])},
            "untuned_over_fastest": over_fastest(rounds, untuned),
            "tuned_is_slower": speedup(rounds[winner], rounds[untuned]).beyond_noise,
            "trials": report.best.trials,
            "seconds": round(time.monotonic() - began, 1),
        }


def favourites_of(shapes: Sequence[AttentionShape], device: DeviceSpec) -> list[list[KernelConfig]]:
    """Return the configs of every shape that its search will try, found in processes of their own."""
    find = partial(favourites, device=device, kernels=competing(), most=TRIALS)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return list(pool.map(find, shapes))


def over_fastest(rounds: RoundsByConfig, config: KernelConfig) -> float:
    """Return a finalist's time over that of the fastest one, paired by round."""
    fastest = min(rounds, key=lambda other: median(rounds[other]))
    return speedup(rounds[config], rounds[fastest]).median


def rows(seed: int, count: int, seconds: float) -> Iterator[dict[str, Any]]:
    device, ends = current_device(), time.monotonic() + seconds
    shapes = draw_shapes(seed, count)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(gpu_lock(device.uuid, print))
        farm = stack.enter_context(farm_for(device))
        monitor = GpuMonitor(device.uuid, own_processes=1)
        runner = KeptFinals(shapes[0], environment=visible(device), monitor=monitor)
        stack.callback(runner.close)
        runner.prepare()
        for shape, configs in zip(shapes, favourites_of(shapes, device), strict=True):
            for config in configs:
                farm.submit_ahead(config.kernel, config, shape, device.limits.cc)
        for number, shape in enumerate(shapes):
            # A store of its own: what was found for one shape is not known for the next.
            store = stack.enter_context(ResultStore.open(f"{folder}/{number}.db"))
            yield Study(device, store, farm, runner).row(shape)
            if time.monotonic() > ends:
                return


def main(seed: int, file: Path, count: int = 20, seconds: float = 600.0) -> None:
    document: dict[str, Any] = {
        "format": FORMAT,
        "schema": SCHEMA,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": source_commit(),
        "device": current_device().name,
        "seed": seed,
        "drawn": count,
        "rows": [],
    }
    for row in rows(seed, count, seconds):
        document["rows"].append(row)
        write_atomically(file, json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n")
        print(f"{row['shape']['label']}: {row['untuned_over_fastest']:.3f} in {row['seconds']} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:5]))

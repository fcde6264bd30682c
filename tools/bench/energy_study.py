"""Whether the fastest config of a shape also takes the least energy, on the GPU that is here.

python -m tools.bench.energy_study --out results/h200.energy.json --seconds 200

The finalists of a shape are the default and the fastest configs of its recorded sweep. They are timed in turns, as in
the finals of a search; then the one of least energy in a burst of each meets the fastest in turns. The file is written
after every shape, and no shape is begun that would not end in time. The next study goes on where the file ends.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from blocktune.cli.output.json_files import read_document
from blocktune.db.exchange.document import save_document
from blocktune.db.records.records import Environment
from blocktune.kernels.hardware.device import DeviceSpec, current_device
from blocktune.kernels.registry import competing
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import BlocktuneError, UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.space import SearchSpace
from blocktune.tuner.candidates.starting_configs import find_contenders
from blocktune.tuner.compile_server.background import Compiler
from blocktune.tuner.lab.sweep_file import Sweep, load_sweep
from blocktune.tuner.measure.device_choice import visible
from blocktune.tuner.measure.environment import measuring_environment, source_commit
from blocktune.tuner.measure.measurement import Energies
from blocktune.tuner.measure.runner import GpuRunner, Runner
from blocktune.tuner.measure.telemetry import GpuMonitor, gpu_lock
from blocktune.tuner.search.finals import frugal_energies, rank_trials
from blocktune.tuner.search.run import farm_for
from blocktune.tuner.search.verdict import decide, speedup
from tools.pages.recorded.energy_tables import FORMAT, SCHEMA

SWEEPS = (
    "sweeps/h200-b2-h32-s8192-d64-bf16-causal",
    "sweeps/h200-b2-h16-s8192-d128-bf16-causal",
    "sweeps/h200-b64-h32-8-s1-8192-d128-bf16",
    "sweeps/h200-b1-h16-s4096-d128-bf16-causal-backward",
    "sweeps/h200-b4-h8-s4096-d256-bf16-causal",
    "sweeps/h200-b8-h16-s2048-d128-bf16",
    "dense-sweeps/h200-b16-h32-8-s1-16384-d128-bf16",
    "sweeps/h200-b4-h16-4-s4096-d128-bf16-causal",
    "sweeps/h200-b32-h32-s512-d64-bf16",
    "sweeps/h200-b1-h32-s4096-d64-bf16-causal-backward",
    "sweeps/h200-b4-h16-s4096-d128-bf16-causal-window-1023-1",
    "sweeps/h200-b2-h32-s8192-d64-bf16",
)
"""Of prefill, decoding and the backward in turns, so that a study that ends early has some of each."""

FASTEST = 5
"""Configs of a sweep that take part, apart from the default."""

Row = dict[str, Any]


class Study:
    """One shape after the other, each in the runner's worker, while the configs of all of them are compiled."""

    def __init__(self, device: DeviceSpec, runner: Runner, turn_to: Callable[[AttentionShape], None]) -> None:
        self._device, self._runner, self._turn_to = device, runner, turn_to

    def row(self, sweep: Sweep, finalists: Sequence[KernelConfig], default: KernelConfig) -> Row:
        """Return the fastest and the most frugal finalist of a shape, with both times and energies.

        Raises:
            BlocktuneError: no finalist passes, or the GPU does not tell its energy.
        """
        self._turn_to(sweep.shape)
        finals = self._runner.finals(finalists)
        if not finals.samples_us:
            raise BlocktuneError(
                f"A finalist must run and be right, but of {sweep.label} none of {len(finalists)} does."
            )
        fastest = decide(finals.samples_us, default, finalists).winner
        energies = frugal_energies(self._runner, list(finals.samples_us), [fastest], most=1)
        if not energies.bursts:
            raise BlocktuneError(f"{self._device.name} must tell its energy, but no burst of {sweep.label} has one.")
        frugal = min(energies.bursts, key=lambda config: energies.energy_mj(config) or 0.0)
        gain = speedup(_energies(energies, fastest), _energies(energies, frugal))
        times = {config: median(rounds) for config, rounds in finals.samples_us.items()}
        return {
            "label": sweep.shape.label,
            "shape": sweep.shape.to_json(),
            "finalists": len(times),
            "fastest": _side(fastest, times, energies),
            "frugal": _side(frugal, times, energies),
            "saved": {"median": gain.median, "low": gain.low, "high": gain.high},
            "differs": frugal != fastest and gain.beyond_noise,
            "disturbance": finals.disturbance or energies.disturbance,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": source_commit(),
        }


def _energies(energies: Energies, config: KernelConfig) -> list[float]:
    return [burst.energy_mj for burst in energies.bursts[config]]


def _side(config: KernelConfig, times: Mapping[KernelConfig, float], energies: Energies) -> Row:
    return {
        "label": config.label,
        "config": config.to_json(),
        "time_us": times[config],
        "energy_mj": energies.energy_mj(config),
        "power_w": energies.power_w(config),
    }


def finalists_of(sweep: Sweep, device: DeviceSpec) -> tuple[KernelConfig, list[KernelConfig]]:
    """Return the default, and the finalists: it and the fastest configs of the sweep that are still feasible."""
    default = find_contenders(sweep.shape, device, competing(), ()).default
    feasible = set(SearchSpace.build(sweep.shape, device.limits, competing()).feasible)
    fastest = [trial.config for trial in rank_trials(sweep.trials) if trial.config in feasible]
    return default, list(dict.fromkeys((default, *fastest[:FASTEST])))


def rows_of(sweeps: Sequence[Sweep], study: Study, compiler: Compiler, device: DeviceSpec, end: float) -> Iterator[Row]:
    """Yield the row of every shape that ends in time, by the one that took longest so far."""
    asked = [(sweep, *finalists_of(sweep, device)) for sweep in sweeps]
    compiled = [
        [compiler.submit(config.kernel, config, sweep.shape, device.limits.cc) for config in finalists]
        for sweep, _, finalists in asked
    ]
    longest = 0.0
    for (sweep, default, finalists), futures in zip(asked, compiled, strict=True):
        begun = time.monotonic()
        wait(futures, timeout=max(0.0, end - begun))
        ready = [
            config
            for config, future in zip(finalists, futures, strict=True)
            if future.done() and future.result().resources
        ]
        if time.monotonic() + longest > end or not ready:
            return
        measured = time.monotonic()
        try:
            yield study.row(sweep, ready, default)
        except BlocktuneError as error:
            print(f"{sweep.label} is left out: {error}", file=sys.stderr)
        longest = max(longest, time.monotonic() - measured)


def document_of(rows: Sequence[Row], device: DeviceSpec, environment: Environment) -> dict[str, Any]:
    """Return what the file holds."""
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "device": device.name,
        "environment": asdict(environment),
        "rows": list(rows),
    }


def rows_in(file: Path, device: DeviceSpec, environment: Environment) -> list[Row]:
    """Return the rows of earlier studies; none without a file.

    Raises:
        UsageError: they are of another device or of other software, so that one table cannot show both.
    """
    if not file.exists():
        return []
    found = read_document(file, "energy", FORMAT, SCHEMA)
    rows: list[Row] = found["rows"]
    if found != document_of(rows, device, environment):
        raise UsageError(f"{file} must be a study of {device.name} with {environment}, but it is of something else.")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to fill, results/DEVICE.energy.json")
    parser.add_argument("--seconds", type=float, default=200.0, help="after which no shape is begun that would not end")
    parser.add_argument("--sweeps", type=Path, default=Path("results"), help="folder of the recorded sweeps")
    given = parser.parse_args()
    begun = time.monotonic()
    device = current_device()
    monitor = GpuMonitor(device.uuid, own_processes=1)
    if monitor.energy_j() is None:
        raise UsageError(f"{device.name} must tell its energy by NVML, but it does not.")
    environment = measuring_environment(device, monitor)
    rows = rows_in(given.out, device, environment)
    done = {AttentionShape.from_json(row["shape"]) for row in rows}
    recorded = (load_sweep(given.sweeps / f"{name}.sweep.json.gz") for name in SWEEPS)
    sweeps = [sweep for sweep in recorded if sweep.shape not in done]
    runner = GpuRunner(sweeps[0].shape, environment=visible(device), monitor=monitor)
    with gpu_lock(device.uuid, lambda message: print(message, file=sys.stderr)), farm_for(device) as compiler:
        try:
            for row in rows_of(sweeps, Study(device, runner, runner.turn_to), compiler, device, begun + given.seconds):
                rows.append(row)
                save_document(document_of(rows, device, environment), given.out)
                seconds = time.monotonic() - begun
                print(
                    f"{seconds:6.1f} s {len(rows)}/{len(SWEEPS)} {row['label']}: differs {row['differs']}", flush=True
                )
        finally:
            runner.close()


if __name__ == "__main__":
    main()

"""A worker of a cluster on synthetic kernels: landscape_fleet_worker.py FOLDER

FOLDER/script.json says how long a measurement takes, and which measurements of the run, counted from 1, kill the worker
(`kill`) or hang it (`hang`). With `hold`, measurements wait for the file FOLDER/go. FOLDER/log gets a line for each.
LANDSCAPE_DRIVER is the driver's version on this node, LANDSCAPE_DEVICE its kind of GPU.
"""

import dataclasses
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.compile.answers import private_stdout
from blocktune.tuner.fleet.job import Job
from blocktune.tuner.fleet.preparation import prepare
from blocktune.tuner.fleet.worker import serve, watch_parent
from blocktune.tuner.lab.replay import ReplayRunner
from blocktune.tuner.measure import environment
from blocktune.tuner.measure.measurement import Measurement
from blocktune.tuner.search.report import OnProgress, TuningReport
from blocktune.tuner.search.tune import tune
from tests.support.models import landscape
from tools.workers.landscape_job_worker import AnyShape


class ScriptedRunner(ReplayRunner):
    """Says what it measures, and does what the script says of a config."""

    def __init__(self, folder: Path, job: Job) -> None:
        super().__init__(landscape.measurements(0))
        self._script = json.loads((folder / "script.json").read_text())
        self._log = folder / "log"
        self._batch = job.shape.batch

    def measure(self, config: KernelConfig) -> Measurement:
        with self._log.open("a") as log:
            log.write(f"measured {os.environ['LANDSCAPE_DEVICE']} {self._batch} {config.label}\n")
        number = self._log.read_text().count("measured")
        if number in self._script.get("kill", ()):
            os.kill(os.getpid(), signal.SIGKILL)
        if number in self._script.get("hang", ()):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(1000)
        while self._script.get("hold") and not (self._log.parent / "go").exists():
            time.sleep(0.05)
        time.sleep(self._script["seconds"])
        return super().measure(config)


def make(folder: Path, job: Job, store: ResultStore, tell: OnProgress) -> TuningReport:
    device = dataclasses.replace(device_named(os.environ["LANDSCAPE_DEVICE"]), source="driver")
    prepare(job, device, store)
    return tune(
        job.shape,
        device=device,
        store=store,
        budget=job.budget,
        on_progress=tell,
        compiler=AnyShape(),
        runner=ScriptedRunner(folder, job),
    )


if __name__ == "__main__":
    watch_parent(os.getppid())
    landscape.replace_kernels()
    environment.driver_version = lambda: os.environ["LANDSCAPE_DRIVER"]
    serve(partial(make, Path(sys.argv[1])), sys.stdin, private_stdout())

"""A worker as `blocktune.tuner.job_worker` on synthetic kernels: landscape_job_worker.py

It tunes for real, with the real store, but nothing is compiled and no GPU is there.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import landscape

from blocktune.db.store import ResultStore
from blocktune.kernels import registry
from blocktune.kernels.config import KernelConfig
from blocktune.tuner.compile_worker import private_stdout
from blocktune.tuner.job import Job
from blocktune.tuner.job_worker import serve
from blocktune.tuner.replay import ReplayRunner
from blocktune.tuner.report import TuningReport
from blocktune.tuner.run import OnProgress, tune


class AnyShape(landscape.InstantCompiler):
    def submit(self, kernel: str, config: KernelConfig, shape: Any, cc: tuple[int, int]) -> Any:
        del shape
        return super().submit(kernel, config, landscape.SHAPE, cc)


def make(job: Job, tell: OnProgress) -> TuningReport:
    with ResultStore.open(job.database) as store:
        return tune(
            job.shape,
            device=landscape.DEVICE,
            store=store,
            budget=job.budget,
            on_progress=tell,
            compiler=AnyShape(),
            runner=ReplayRunner(landscape.measurements(0)),
        )


if __name__ == "__main__":
    registry.KERNELS.clear()
    registry.KERNELS.update(landscape.KERNELS)
    serve(make, sys.stdin, private_stdout())

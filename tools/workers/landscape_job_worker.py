"""A worker as `blocktune.tuner.fleet.worker` on synthetic kernels: landscape_job_worker.py

It tunes for real, with the real store, but nothing is compiled and no GPU is there.
"""

import sys
from typing import Any

from blocktune.db.store import ResultStore
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.compile.answers import private_stdout
from blocktune.tuner.fleet.job import Job
from blocktune.tuner.fleet.worker import serve
from blocktune.tuner.lab.replay import ReplayRunner
from blocktune.tuner.search.report import OnProgress, TuningReport
from blocktune.tuner.search.tune import tune
from tests.support.models import landscape


class AnyShape(landscape.InstantCompiler):
    def submit(self, kernel: str, config: KernelConfig, shape: Any, cc: tuple[int, int]) -> Any:
        del shape
        return super().submit(kernel, config, landscape.SHAPE, cc)


def make(job: Job, store: ResultStore, tell: OnProgress) -> TuningReport:
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
    landscape.replace_kernels()
    serve(make, sys.stdin, private_stdout())

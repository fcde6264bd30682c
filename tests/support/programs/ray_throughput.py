"""Local executor against Ray on the GPUs of this machine: ray_throughput.py SHAPES TRIALS

Both tune the same shapes with cold caches, in turns: local, Ray. Prints seconds of either and Ray's share of the local
throughput. The start of Ray counts apart, since a cluster is there before a run.
"""

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import present_devices
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.fleet.executor import Executor
from blocktune.tuner.fleet.job import Failed, Finished, Job
from blocktune.tuner.fleet.local_executor import LocalExecutor
from blocktune.tuner.fleet.ray_cluster import connected
from blocktune.tuner.fleet.ray_executor import RayExecutor
from blocktune.tuner.measure.device_choice import alike_devices
from blocktune.tuner.search.report import Budget
from blocktune.tuner.search.shape_defaults import complete_shape


@contextmanager
def cold_caches() -> Iterator[Path]:
    """Yield an empty folder, which holds all caches of processes that start in the block."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": f"{folder}/cache"}
        yield Path(folder)


def seconds_of(executor: Executor, jobs: list[Job], place: Path) -> float:
    with ResultStore.open(place):
        pass
    begun = time.monotonic()
    for event in executor.run([dataclasses.replace(job, database=str(place)) for job in jobs]):
        if isinstance(event, (Finished, Failed)):
            sys.stderr.write(f"{time.monotonic() - begun:6.1f} s {event.job.shape.label} {type(event).__name__}\n")
    return time.monotonic() - begun


def shapes(count: int) -> list[AttentionShape]:
    """Return this many shapes of growing length."""
    return [complete_shape(512 * (1 + number // 2), (64, 128)[number % 2]) for number in range(count)]


def main(count: int, trials: int) -> None:
    alike, _ = alike_devices(present_devices()[0])
    jobs = [Job(shape=shape, device=alike[0].key, budget=Budget(trials=trials)) for shape in shapes(count)]
    with cold_caches() as folder:
        local = seconds_of(LocalExecutor(alike), jobs, folder / "local.db")
    with cold_caches() as folder:
        begun = time.monotonic()
        with connected(None):
            start = time.monotonic() - begun
            cluster = seconds_of(RayExecutor(), jobs, folder / "ray.db")
    sys.stdout.write(
        f"{len(alike)} GPUs, {count} shapes, {trials} trials: local {local:.1f} s, Ray {cluster:.1f} s (start "
        f"{start:.1f} s apart): Ray at {local / cluster:.3f} of the local throughput\n"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

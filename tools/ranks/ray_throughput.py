"""Local executor against Ray on the GPUs of this machine: ray_throughput SHAPES TRIALS [OUT]

Both tune the same shapes with cold caches, one after the other: local, Ray. Prints when each job began and ended, the
seconds of either engine and Ray's share of the local throughput, and writes them to OUT as a table. The start of Ray
counts apart, since a cluster is there before a run. What follows the first job of every GPU has columns of its own: the
start of the workers, which a run makes once, is over by then.
"""

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch

from blocktune.db.exchange.document import save_text
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import present_devices
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.cluster.connection import connect_cluster
from blocktune.tuner.cluster.executor import RayExecutor
from blocktune.tuner.fleet.executor import Executor
from blocktune.tuner.fleet.job import Failed, Finished, Job, Started
from blocktune.tuner.fleet.local_executor import LocalExecutor
from blocktune.tuner.measure.device_choice import alike_devices
from blocktune.tuner.search.report import Budget
from tests.support.ranks.document import new_document, table

COLUMNS = (
    "GPUs", "engine", "seconds", "trials a second", "throughput over the local executor's",
    "seconds after every GPU's first job", "their throughput over the local executor's",
)  # fmt: skip


@contextmanager
def cold_caches() -> Iterator[Path]:
    """Yield an empty folder, which holds all caches of processes that start in the block."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": f"{folder}/cache"}
        yield Path(folder)


def ends_of(executor: Executor, jobs: list[Job], place: Path) -> list[float]:
    """Return after how many seconds each job ended, in order."""
    with ResultStore.open(place):
        pass
    begun, ends = time.monotonic(), list[float]()
    for event in executor.run([dataclasses.replace(job, database=str(place)) for job in jobs]):
        if isinstance(event, (Started, Finished, Failed)):
            spent = time.monotonic() - begun
            sys.stderr.write(f"{spent:6.1f} s {event.job.shape.label} {type(event).__name__}\n")
            ends += [] if isinstance(event, Started) else [spent]
    return ends


def shapes(count: int) -> list[AttentionShape]:
    """Return this many shapes of growing length."""
    return [complete_shape(512 * (1 + number // 2), (64, 128)[number % 2]) for number in range(count)]


def cells(gpus: int, name: str, ends: list[float], local: list[float], trials: int) -> list[str]:
    """Return the row of an engine. The jobs that end first are each the first one of a GPU."""
    rest, local_rest = ends[-1] - ends[gpus - 1], local[-1] - local[gpus - 1]
    rate, share = len(ends) * trials / ends[-1], local[-1] / ends[-1]
    return [
        str(gpus),
        name,
        f"{ends[-1]:.1f}",
        f"{rate:.2f}",
        f"{share:.3f}",
        f"{rest:.1f}",
        f"{local_rest / rest:.3f}",
    ]


def main(count: int, trials: int, out: Path | None) -> None:
    alike, _ = alike_devices(present_devices()[0])
    jobs = [Job(shape=shape, device=alike[0].key, budget=Budget(trials=trials)) for shape in shapes(count)]
    with cold_caches() as folder:
        local = ends_of(LocalExecutor(alike), jobs, folder / "local.db")
        sys.stdout.write(f"local {local[-1]:.1f} s\n")
        sys.stdout.flush()
    with cold_caches() as folder:
        begun = time.monotonic()
        with connect_cluster(None):
            start = time.monotonic() - begun
            cluster = ends_of(RayExecutor(), jobs, folder / "ray.db")
    how = f"{count} shapes of 512 to {jobs[-1].shape.seqlen_q:,} tokens, {trials} trials each, tuned from empty caches"
    how += f" one executor after the other; the start of Ray, {start:.1f} s, counts apart."
    engines = {"local executor": local, "Ray": cluster}
    rows = [cells(len(alike), name, ends, local, trials) for name, ends in engines.items()]
    sys.stdout.write(f"{how}\n" + "\n".join(" ".join(row) for row in rows) + "\n")
    if out is not None:
        document = new_document(torch.device("cuda"))
        document["environment"] |= {"ray": version("ray")}
        save_text(json.dumps(table(document, how, COLUMNS, rows), indent=1, sort_keys=True) + "\n", out)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)

"""A real Ray cluster on this machine, whose nodes have GPUs that are not there; a landscape is what is measured."""

import contextlib
import dataclasses
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.records.records import Trial
from blocktune.db.store import ResultStore
from blocktune.kernels import registry
from blocktune.kernels.hardware.device import device_named
from blocktune.tuner.cluster.compiling import CodeAhead
from blocktune.tuner.cluster.received_records import ReceivedRecords
from blocktune.tuner.cluster.task_record import TaskRecord
from blocktune.tuner.fleet.job import Event, Job
from blocktune.tuner.search.report import Budget
from tests.support.models import landscape
from tools import ROOT, program

MARK = "BLOCKTUNE_TEST_CLUSTER"
"""Environment variable of every process of a cluster."""

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what binds Ray to 127.0.0.1
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_AUTH_MODE": "disabled",  # its token would be written to the home directory
}
OBJECT_STORE_BYTES = 80 << 20
END_SECONDS = 30.0
"""How long processes may take to end once their cluster is gone."""


class RayFleet:
    """A cluster, a store and a log of what was measured and stored, in order."""

    def __init__(self, folder: Path) -> None:
        from blocktune.tuner.cluster.executor import RayExecutor

        self.folder = folder
        self._make_executor = RayExecutor
        self.place = folder / "store.db"
        self.command = (*program("workers.landscape_fleet_worker"), str(folder))
        self.ahead_command = (*program("workers.landscape_ahead_worker"), str(folder))
        self.script(seconds=0.01)
        (folder / "log").touch()
        self._start()

    def _start(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        self._add(num_cpus=0)  # the head, where the driver is

    def restart(self) -> None:
        """End the cluster, its head included, and begin another one without GPUs."""
        self.close()
        self._start()

    def script(self, **values: Any) -> None:
        """Say what measurements do."""
        (self.folder / "script.json").write_text(json.dumps(values))

    def add_node(self, gpus: int = 1, device: str = "h200", driver: str = "550.54") -> Any:
        """Add a node with GPUs of this kind."""
        from blocktune.tuner.cluster.connection import kind_resource

        environment = {"LANDSCAPE_DEVICE": device, "LANDSCAPE_DRIVER": driver, "TRITON_CACHE_DIR": str(self.cache)}
        environment["XDG_CACHE_HOME"] = str(self.folder)
        resources = {kind_resource(device_named(device).key): gpus}
        return self._add(num_cpus=gpus + 1, num_gpus=gpus, resources=resources, env_vars=environment)

    def add_compile_node(self, processors: int) -> Any:
        """Add a node without GPUs."""
        return self._add(num_cpus=processors, num_gpus=0, env_vars={"LANDSCAPE_DEVICE": "none"})

    def kill(self, node: Any) -> None:
        """End a node as a power cut does."""
        self.cluster.remove_node(node, allow_graceful=False)

    def _add(self, **options: Any) -> Any:
        return self.cluster.add_node(object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False, **options)

    def job(self, batch: int, trials: int, device: str = "h200") -> Job:
        """Return a job whose shape has this batch."""
        shape = dataclasses.replace(landscape.SHAPE, batch=batch)
        key, place = device_named(device).key, str(self.place)
        return Job(shape=shape, device=key, database=place, budget=Budget(trials=trials))

    def executor(self, **options: Any) -> Any:
        return self._make_executor(**{"command": self.command, "ahead_command": self.ahead_command} | options)

    def run(self, *jobs: Job, **options: Any) -> list[Event]:
        return list(self.executor(**options).run(jobs))

    @contextlib.contextmanager
    def driver(self) -> Iterator[None]:
        """Be a driver of the cluster in the block."""
        from blocktune.tuner.cluster.connection import connect_cluster

        with connect_cluster(self.cluster.address):
            yield

    @property
    def cache(self) -> Path:
        """Triton's cache on every node."""
        return self.folder / "triton"

    @property
    def log(self) -> list[str]:
        return (self.folder / "log").read_text().splitlines()

    def stored(self, job: Job) -> list[Trial]:
        """Return the trials of a job in the store."""
        with ResultStore.open(self.place, read_only=True) as store:
            device = next(device for device in store.devices() if device.key == job.device)
            return store.trials(device, job.shape)

    def require_order(self) -> None:
        """Check that nothing was measured that had been stored before, and that something was."""
        stored = set()
        for line in self.log:
            event, _, what = line.partition(" ")
            assert event == "stored" or what not in stored, f"{what} was measured twice"
            if event == "stored":
                stored.add(what)
        assert stored

    def close(self) -> None:
        self.cluster.shutdown()


class LoggedRecords(ReceivedRecords):
    """Says in the log what the driver has stored; `log` is set by the test."""

    log: Path

    def flush(self) -> None:
        waiting = list(self._trials)
        super().flush()
        if not self._trials:
            with self.log.open("a") as log:
                log.writelines(f"stored {_name(trial)} {trial.shape.batch} {trial.config.label}\n" for trial in waiting)


class WatchedCode(CodeAhead):
    """Makes the file `go` once code waits for a job, and no compile task is left; set by the test."""

    go: Path

    def keep_up(self, records: Iterable[TaskRecord], nodes: Sequence[Mapping[str, Any]]) -> None:
        super().keep_up(records, nodes)
        if any(self._tasks.values()) and not self._pending_tasks():
            self.go.touch()


def _name(trial: Trial) -> str:
    return next(name for name in ("h200", "h100-sxm") if device_named(name).key == trial.device.key)


@contextlib.contextmanager
def ray_fleet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayFleet]:
    """Yield a cluster without GPUs; in the end all of its processes are gone."""
    mark = uuid.uuid4().hex
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    for name, value in (QUIET | {MARK: mark, "PYTHONPATH": os.pathsep.join(paths)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)  # read when Ray was imported
    monkeypatch.setattr(LoggedRecords, "log", folder / "log", raising=False)
    monkeypatch.setattr("blocktune.tuner.cluster.executor.ReceivedRecords", LoggedRecords)
    monkeypatch.setattr(WatchedCode, "go", folder / "go", raising=False)
    monkeypatch.setattr("blocktune.tuner.cluster.executor.CodeAhead", WatchedCode)
    monkeypatch.setattr(registry, "KERNELS", dict(landscape.KERNELS))
    fleet = RayFleet(folder)
    try:
        yield fleet
    finally:
        fleet.close()
    deadline = time.monotonic() + END_SECONDS
    while left := marked(mark):
        assert time.monotonic() < deadline, f"processes outlived their cluster: {left}"
        time.sleep(0.1)


def marked(mark: str) -> list[str]:
    """Return the command lines of the processes whose environment has the mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found

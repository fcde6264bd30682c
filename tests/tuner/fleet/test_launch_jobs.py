"""Jobs about calls of autotuned kernels: plain values on their way, and the search that makes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.records.records import Outcome
from blocktune.db.store import ResultStore
from blocktune.kernels.values.config import Origin
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.compile_server.compile_ahead import CompileAhead
from blocktune.tuner.drop_in.request import LaunchRequest
from blocktune.tuner.fleet.ahead_worker import candidates
from blocktune.tuner.fleet.job import Job, progress_from, progress_json
from blocktune.tuner.fleet.streamed_store import relevant_records
from blocktune.tuner.fleet.worker import make_job
from blocktune.tuner.launches.launch_bench import LaunchTools
from blocktune.tuner.launches.launch_runner import LaunchMachine
from blocktune.tuner.search.report import Budget, Progress
from tests.support.fakes.fake_triton import FakeGpu, FakeHookedClock
from tests.support.triton_modes import compiled_here
from tests.tuner.drop_in.conftest import H200, compiler, gpu, path

__all__ = ["compiler", "gpu", "path"]

pytestmark = compiled_here

REQUEST = LaunchRequest(
    kernel="tests.support.libraries.autotuned_kernels:scale_kernel",
    arguments="tests.support.libraries.autotuned_kernels:scale_arguments",
    sizes=(("n", 1000),),
    choices=(("BLOCK", (128, 256)), ("num_warps", (2, 4))),
    expand=2,
    folder="/somewhere",
)
CONFIG = LaunchConfig(REQUEST.kernel, (("BLOCK", 256), ("num_warps", 2), ("num_stages", 3)))


def job(**changes: Any) -> Job:
    return Job(shape=REQUEST, device=H200.key, budget=Budget(trials=3), lethal=(CONFIG,), **changes)


def test_a_job_and_its_progress_travel_as_plain_values() -> None:
    assert Job.from_json(json.loads(json.dumps(job().to_json()))) == job()
    assert job().shape.label == "scale_kernel n=1000"
    told = Progress(phase="search", done=1, total=4, best=CONFIG, measuring=CONFIG)
    assert progress_from(json.loads(json.dumps(progress_json(told)))) == told


def test_only_the_worker_of_a_call_can_make_it(path: Path) -> None:
    assert candidates(job(), 8) == []
    with ResultStore.open(path) as store:
        assert relevant_records(store, job()) == ()


def test_a_worker_searches_the_call_and_leaves_out_what_killed_others(
    gpu: FakeGpu, compiler: CompileAhead, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = LaunchMachine(ahead=compiler, launches=LaunchTools(lambda l2: FakeHookedClock(gpu), lambda: None))
    monkeypatch.setattr("blocktune.tuner.search.tune_launch.launch_machine", lambda: machine)
    monkeypatch.setattr("blocktune.tuner.fleet.worker.is_present", lambda device: True)
    farm: Any = None
    with ResultStore.open(path) as store:
        report = make_job(H200, farm, job(), store, lambda progress: None)
    assert report.best.origin is Origin.MEASURED
    assert report.best.config != CONFIG
    assert report.outcomes[Outcome.RUN_ERROR] == 1

"""The process that makes jobs: real searches by two of them into one store, and what it answers."""

import dataclasses
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.values.errors import NoDeviceError, NoFeasibleConfigError, StoreLockedError, UsageError
from blocktune.tuner.compile.child_process import Child, ChildDiedError
from blocktune.tuner.fleet.job import Finished, Job, progress_from
from blocktune.tuner.fleet.local_executor import LocalExecutor, worker_command
from blocktune.tuner.fleet.worker import make_job, serve
from blocktune.tuner.search.report import Budget, Progress
from tests.support.models import landscape
from tools import program

pytestmark = pytest.mark.triton_free

TRIALS = 20
SHAPES = tuple(dataclasses.replace(landscape.SHAPE, batch=batch) for batch in (1, 2, 3, 4))


def job(shape: Any = landscape.SHAPE, **changes: Any) -> Job:
    return Job(shape=shape, device=landscape.DEVICE.key, **changes)


def gpu(number: int) -> DeviceSpec:
    return dataclasses.replace(device_named("h200"), uuid=f"GPU-{number}", source="driver")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_workers_keep_everything_in_one_store_and_a_second_run_answers_from_it(tmp_path: Path) -> None:
    place = tmp_path / "store.db"
    with ResultStore.open(place):
        pass
    jobs = [job(shape, database=str(place), budget=Budget(trials=TRIALS)) for shape in SHAPES]
    command = program("workers.landscape_job_worker")
    reports = {}
    for resumed in (0, TRIALS):
        events = list(LocalExecutor([gpu(0), gpu(1)], command=command).run(jobs))
        done = [event for event in events if isinstance(event, Finished)]
        assert len(done) == len(jobs)
        assert {event.worker for event in done} == {"GPU 0", "GPU 1"}
        assert [event.report["resumed"] for event in done] == [resumed] * len(jobs)
        reports[resumed] = {event.job: event.report["best"]["config"] for event in done}
    assert reports[0] == reports[TRIALS]
    with ResultStore.open(place, read_only=True) as store:
        assert [len(store.trials(landscape.DEVICE, shape)) for shape in SHAPES] == [TRIALS] * len(SHAPES)
        for shape in SHAPES:
            best = store.best(landscape.DEVICE, shape)
            assert best is not None
            assert best.config.to_json() == reports[0][job(shape, database=str(place), budget=Budget(trials=TRIALS))]


def answers(make: Any, *jobs: Job) -> list[dict[str, Any]]:
    lines = io.StringIO("".join(json.dumps(each.to_json()) + "\n" for each in jobs))
    said = io.StringIO()
    serve(make, lines, said)
    return [json.loads(line) for line in said.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NoFeasibleConfigError("nothing fits"), 3),
        (UsageError("too large"), 2),
        (StoreLockedError("locked"), 5),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_wrong_with_a_job_is_its_answer_and_the_next_one_is_made(
    error: BaseException, code: int, tmp_path: Path
) -> None:
    place = str(tmp_path / "store.db")
    progress = Progress(phase="search", done=3, total=9, best=landscape.SPACE.feasible[0], best_us=12.5)

    def make(asked: Job, store: ResultStore, tell: Any) -> Any:
        tell(progress)
        raise error

    first, end, *rest = answers(make, job(database=place), job(database=place, seed=1))
    assert progress_from(first["progress"]) == progress
    assert end["exit_code"] == code
    assert end["error"]
    assert len(rest) == 2


def test_a_gpu_of_another_kind_ends_the_worker(tmp_path: Path) -> None:
    compiler, asked = landscape.InstantCompiler(), job(database=str(tmp_path / "store.db"))

    def make(asked: Job, store: ResultStore, tell: Any) -> Any:
        return make_job(device_named("h200"), compiler, asked, store, tell)

    with pytest.raises(NoDeviceError, match="here is no GPU"):
        answers(make, asked)
    a100 = dataclasses.replace(device_named("a100"), source="driver")
    with (
        ResultStore.open(asked.database) as store,
        pytest.raises(NoDeviceError, match=r"nvidia h200.*here is nvidia a100"),
    ):
        make_job(a100, compiler, asked, store, lambda progress: None)


def test_the_real_worker_starts_and_says_why_it_ends() -> None:
    child = Child(worker_command(), os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    try:
        child.send(job().to_json())
        with pytest.raises(ChildDiedError, match="but here is no GPU"):
            child.receive(60)
    finally:
        child.end()


@pytest.mark.gpu
def test_several_gpus_of_one_host_share_shapes(tmp_path: Path) -> None:
    from blocktune.kernels.hardware.device import present_devices
    from blocktune.tuner.candidates.shape_defaults import complete_shape
    from blocktune.tuner.measure.device_choice import alike_devices

    alike, _ = alike_devices(present_devices()[0])
    if len(alike) < 2:
        pytest.skip("needs two GPUs of one kind")
    place = tmp_path / "store.db"
    with ResultStore.open(place):
        pass
    shapes = [complete_shape(seq, 64) for seq in (512, 1024, 2048, 4096)]
    jobs = [
        Job(shape=shape, device=alike[0].key, database=str(place), budget=Budget(trials=8), kernels=("flash_fwd",))
        for shape in shapes
    ]
    done = [event for event in LocalExecutor(alike[:2]).run(jobs) if isinstance(event, Finished)]
    assert sorted(event.job.shape.seqlen_q for event in done) == [512, 1024, 2048, 4096]
    assert {event.worker for event in done} == {"GPU 0", "GPU 1"}
    assert {event.report["device"]["uuid"] for event in done} == {device.uuid for device in alike[:2]}
    with ResultStore.open(place, read_only=True) as store:
        assert all(store.best(alike[0], shape) is not None for shape in shapes)

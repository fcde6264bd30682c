"""Many jobs on several GPUs that are not there: who gets what, and what becomes of jobs whose workers die."""

import contextlib
import dataclasses
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.records.records import Objective, Regime
from blocktune.kernels.hardware import device
from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile_server.farm import processors
from blocktune.tuner.fleet import local_executor
from blocktune.tuner.fleet.executor import Executor
from blocktune.tuner.fleet.job import Advanced, Event, Failed, Finished, Job, Started, WorkerLost
from blocktune.tuner.fleet.local_executor import LocalExecutor
from blocktune.tuner.measure.device_choice import alike_devices
from blocktune.tuner.search.report import Budget, Progress
from tools import program

pytestmark = pytest.mark.triton_free


def gpu(number: int, name: str = "h200") -> DeviceSpec:
    return dataclasses.replace(device_named(name), uuid=f"GPU-{number}", source="driver")


def job(batch: int, **changes: Any) -> Job:
    shape = AttentionShape(
        batch=batch, num_heads=4, num_heads_kv=4, seqlen_q=128, seqlen_k=128, head_dim=64, head_dim_v=64
    )
    return Job(shape=shape, device=gpu(0).key, **changes)


class Host:
    """Some GPUs with fake workers; `log` is who began what, in order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.script: dict[str, str] = {}

    def executor(self, gpus: int, **options: Any) -> LocalExecutor:
        (self._folder / "script.json").write_text(json.dumps(self.script))
        command = (*program("workers.fake_job_worker"), str(self._folder))
        return LocalExecutor([gpu(number) for number in range(gpus)], command=command, **options)

    def run(self, gpus: int, *batches: int) -> list[Event]:
        return list(self.executor(gpus).run([job(batch) for batch in batches]))

    @property
    def log(self) -> list[tuple[str, int, int, int]]:
        rows = [line.split() for line in (self._folder / "log").read_text().splitlines()]
        return [(uuid, int(share), int(batch), int(pid)) for uuid, share, batch, pid in rows]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    deadline = time.monotonic() + 60
    while any(alive(pid) for *_, pid in host.log):
        assert time.monotonic() < deadline, "a worker outlived its executor"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ended(events: list[Event], kind: type[Any]) -> list[int]:
    return [event.job.shape.batch for event in events if isinstance(event, kind)]


def test_the_longest_jobs_begin_first_and_whoever_is_idle_takes_the_next(host: Host) -> None:
    host.script = {"9": "0.8"} | {str(batch): "0.05" for batch in range(1, 9)}
    events = host.run(2, *range(1, 10))
    assert sorted(ended(events, Finished)) == list(range(1, 10))
    assert ended(events, Started) == list(range(9, 0, -1))
    long_one = next(uuid for uuid, _, batch, _ in host.log if batch == 9)
    assert Counter(uuid for uuid, *_ in host.log)[long_one] == 1  # the other one has made all the rest meanwhile
    assert len({pid for *_, pid in host.log}) == 2


def test_an_exhaustive_search_is_as_long_as_its_configs_are_many() -> None:
    little, many = job(9, exhaustive=True, configs=64), job(1, exhaustive=True, configs=2336)
    assert max(little, many, key=lambda each: each.size) is many
    assert max(job(9, configs=64), job(1, configs=2336), key=lambda each: each.size).shape.batch == 9  # bounded alike


def test_workers_see_one_gpu_each_and_share_the_processors(host: Host) -> None:
    host.script = {str(batch): "0.3" for batch in (1, 2, 3)}
    host.run(3, 1, 2, 3)
    assert {uuid for uuid, *_ in host.log} == {"GPU-0", "GPU-1", "GPU-2"}
    assert {share for _, share, *_ in host.log} == {max(1, int(processors()) // 3)}


def test_progress_and_ends_name_job_and_worker(host: Host) -> None:
    events = host.run(1, 5)
    started, advanced, finished = events
    assert started == Started(job(5), "GPU 0")
    assert isinstance(advanced, Advanced)
    assert advanced.progress == Progress(phase="search", done=1, total=4, outcomes={"ok": 1})  # type: ignore[dict-item]
    assert isinstance(finished, Finished)
    assert (finished.worker, finished.report["gpu"]) == ("GPU 0", "GPU-0")


def test_a_job_that_fails_does_not_stop_the_others(host: Host) -> None:
    host.script = {"2": "fail"}
    events = host.run(2, 1, 2, 3)
    assert sorted(ended(events, Finished)) == [1, 3]
    assert [(event.error, event.exit_code) for event in events if isinstance(event, Failed)] == [("nothing fits", 3)]


@pytest.mark.parametrize("death", ["die", "babble"])
def test_a_job_is_taken_over_twice_and_by_others_as_long_as_there_are_any(host: Host, death: str) -> None:
    host.script = {"7": death}
    events = host.run(3, 7, 1, 2)
    assert sorted(ended(events, Finished)) == [1, 2]
    assert ended(events, WorkerLost) == [7, 7]
    assert ended(events, Failed) == [7]
    assert {uuid for uuid, _, batch, _ in host.log if batch == 7} == {"GPU-0", "GPU-1", "GPU-2"}
    failed = next(event for event in events if isinstance(event, Failed))
    assert "3 workers died of it" in failed.error
    if death == "die":
        assert "killed by SIGKILL. out of luck" in failed.error


def test_one_worker_alone_takes_its_job_over_itself(host: Host) -> None:
    host.script = {"7": "die"}
    events = host.run(1, 7, 1)
    assert ended(events, Finished) == [1]
    assert [batch for *_, batch, _ in host.log].count(7) == 3


def test_a_gpu_that_loses_every_job_gets_no_more(host: Host) -> None:
    host.script = {"GPU-1": "die"} | {str(batch): "0.1" for batch in range(1, 11)}
    events = host.run(2, *range(1, 11))
    assert sorted(ended(events, Finished)) == list(range(1, 11))
    lost = [event for event in events if isinstance(event, WorkerLost)]
    assert [event.worker for event in lost] == ["GPU 1"] * local_executor.MAX_LOSSES_IN_A_ROW
    assert [event.retired for event in lost] == [False, False, True]


def test_when_every_gpu_loses_every_job_all_fail(host: Host) -> None:
    host.script = {"GPU-0": "die", "GPU-1": "die"}
    events = host.run(2, *range(1, 9))
    assert sorted(ended(events, Failed)) == list(range(1, 9))
    assert not ended(events, Finished)


def test_an_interrupt_keeps_what_was_found_and_begins_nothing(host: Host) -> None:
    host.script = {"8": "wait", "9": "wait"}
    executor = host.executor(2)
    events = []
    for event in executor.run([job(batch) for batch in (1, 8, 9)]):
        events.append(event)
        if len(ended(events, Advanced)) == 2 and isinstance(event, Advanced):
            executor.interrupt()
    assert sorted(ended(events, Finished)) == [8, 9]
    assert all(event.report["interrupted"] for event in events if isinstance(event, Finished))
    assert 1 not in ended(events, Started)


def test_who_does_not_hear_the_interrupt_is_killed(host: Host) -> None:
    host.script = {"9": "deaf"}
    executor = host.executor(1, interrupt_seconds=0.3)
    events = []
    for event in executor.run([job(9), job(1)]):
        events.append(event)
        if isinstance(event, Advanced) and event.progress.done == 2:
            executor.interrupt()
    assert [(event.job.shape.batch, event.exit_code) for event in events if isinstance(event, Failed)] == [(9, 130)]


@pytest.mark.parametrize("leave", [lambda events: events.close(), lambda events: events.throw(KeyboardInterrupt)])
def test_who_stops_listening_leaves_no_process(host: Host, leave: Callable[[Any], None]) -> None:
    host.script = {"8": "wait", "9": "deaf"}
    events = host.executor(2).run([job(8), job(9), job(1)])
    seen = []
    while len(ended(seen, Advanced)) < 3:
        seen.append(next(events))
    with contextlib.suppress(KeyboardInterrupt):
        leave(events)
    assert not any(alive(pid) for *_, pid in host.log)


def test_the_local_executor_fills_the_seam(host: Host) -> None:
    executor: Executor = host.executor(1)
    assert ended(list(executor.run([job(1)])), Finished) == [1]


def test_a_job_survives_its_journey() -> None:
    sent = job(3, database="x.db", budget=Budget(seconds=9.5), kernels=("flash_fwd",), seed=7)
    sent = dataclasses.replace(sent, exhaustive=True, configs=12, regime=Regime.BURST, sampler="tpe", study="search.db")
    sent = dataclasses.replace(sent, objective=Objective.ENERGY)
    assert Job.from_json(json.loads(json.dumps(sent.to_json()))) == sent
    assert Job.from_json(json.loads(json.dumps(job(4).to_json()))) == job(4)


def test_unlike_gpus_are_never_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    nameless = dataclasses.replace(gpu(3), uuid=None)
    here = (gpu(0), gpu(1, "a100"), gpu(2), nameless)
    monkeypatch.setattr(device, "present_devices", lambda: here)
    assert alike_devices(gpu(0)) == ((gpu(0), gpu(2)), (gpu(1, "a100"), nameless))
    assert alike_devices(gpu(1, "a100"))[0] == (gpu(1, "a100"),)

"""Many searches on a Ray cluster: several raylets on this machine, with GPUs that are not there."""

import dataclasses
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.records.records import Outcome
from blocktune.db.store import ResultStore
from blocktune.tuner.fleet.job import Advanced, Event, Failed, Finished, Job, Started, WorkerLost
from blocktune.tuner.fleet.local_executor import INTERRUPT_SECONDS
from blocktune.tuner.fleet.streamed_store import relevant_records
from tests.support.ranks.ray_clusters import OBJECT_STORE_BYTES, RayFleet, ray_fleet
from tests.support.stores.postgres_server import need_server, running_server
from tools import program

pytest.importorskip("ray")
pytestmark = [pytest.mark.triton_free, pytest.mark.slow]

INLINE_BYTES = 100 << 10
"""Ray sends larger arguments through its object stores."""

KILLED = "the worker process ended: killed by SIGKILL."


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayFleet]:
    with ray_fleet(tmp_path, monkeypatch) as fleet:
        yield fleet


def of_kind(events: list[Event], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_two_jobs_are_made_and_their_trials_are_in_the_driver_s_store(fleet: RayFleet) -> None:
    """The second one finds what was compiled while the first one measured."""
    fleet.script(seconds=0.01, hold=True)
    fleet.add_node()
    jobs = [fleet.job(1, trials=8), fleet.job(2, trials=8)]
    with fleet.driver():
        events = fleet.run(*jobs)
    assert [event.job.shape.batch for event in of_kind(events, Started)] == [2, 1]  # the longest first
    assert {event.job for event in of_kind(events, Finished)} == set(jobs)
    assert [len(fleet.stored(job)) for job in jobs] == [8, 8]
    assert [path.name for path in fleet.cache.iterdir()] == ["kernel-1-0"]
    assert json.loads((fleet.cache / "kernel-1-0" / "__grp__code.json").read_text()) == {
        "child_paths": {"code.cubin": str(fleet.cache / "kernel-1-0" / "code.cubin")}
    }
    assert [path.name for path in fleet.folder.glob("blocktune/resources/*")] == ["kernel-1-0.json"]
    fleet.require_order()


@pytest.mark.cluster
def test_nodes_without_gpus_compile_for_those_that_have_some(fleet: RayFleet, caplog: pytest.LogCaptureFixture) -> None:
    fleet.script(seconds=0.01, hold=True, ahead_dies=[2])
    fleet.add_node()
    fleet.add_compile_node(processors=4)
    jobs = [fleet.job(batch, trials=12) for batch in (1, 2, 3)]
    with fleet.driver():
        events = fleet.run(*jobs)
    assert {event.job for event in of_kind(events, Finished)} == set(jobs)
    assert {path.name for path in fleet.cache.iterdir()} == {"kernel-1-0", "kernel-1-1"}
    assert sorted(line for line in fleet.log if line.startswith("compiled") and line.endswith("none")) != []
    (remark,) = [record.message for record in caplog.records if "compiled ahead" in record.message]
    assert "killed by SIGKILL" in remark
    assert not of_kind(events, WorkerLost)
    fleet.require_order()


@pytest.mark.cluster
def test_a_node_that_is_lost_costs_nothing_and_one_that_joins_late_takes_over(fleet: RayFleet) -> None:
    fleet.script(seconds=0.1)
    node, job = fleet.add_node(), fleet.job(1, trials=40)
    events: list[Event] = []
    with fleet.driver():
        for event in fleet.executor().run([job]):
            events.append(event)
            if node is not None and isinstance(event, Advanced) and event.progress.done >= 12:
                fleet.kill(node)
                node = None
                fleet.add_node()
    assert [type(event) for event in events if not isinstance(event, Advanced)] == [
        Started,
        WorkerLost,
        Started,
        Finished,
    ]
    assert "node is gone" in of_kind(events, WorkerLost)[0].reason
    assert of_kind(events, Finished)[0].report["resumed"] >= 10
    assert len(fleet.stored(job)) == 40
    fleet.require_order()


@pytest.mark.cluster
def test_configs_that_kill_or_hang_a_worker_are_remembered_and_not_tried_again(fleet: RayFleet) -> None:
    fleet.add_node()
    fleet.script(seconds=0, kill=[3], hang=[6])
    job = fleet.job(1, trials=12)
    with fleet.driver():
        events = fleet.run(job, silence_seconds=10)
    assert [event.reason for event in of_kind(events, WorkerLost)] == [KILLED, "silent for 10 s"]
    assert len(of_kind(events, Finished)) == 1
    measured = [line.removeprefix("measured h200 1 ") for line in fleet.log if line.startswith("measured")]
    assert len(set(measured)) == len(measured)
    trials = {trial.config.label: trial for trial in fleet.stored(job)}
    for number in (3, 6):
        trial = trials[measured[number - 1]]
        assert (trial.outcome, trial.error) == (Outcome.RUN_ERROR, "a worker died while it measured this config")
    fleet.require_order()


@pytest.mark.cluster
def test_each_kind_tunes_for_itself_and_excluded_software_measures_nothing(fleet: RayFleet) -> None:
    fleet.add_node(driver="535.104")
    fleet.add_node(driver="550.54")
    fleet.add_node(device="h100-sxm", driver="550.54")
    jobs = [fleet.job(batch, 8, device) for device in ("h200", "h100-sxm") for batch in (1, 2)]
    with fleet.driver():
        events = fleet.run(*jobs, excluded=["driver=535"])
        assert {event.job for event in of_kind(events, Finished)} == set(jobs)
        for job in jobs:
            trials = fleet.stored(job)
            assert {(trial.environment.driver, trial.device.key) for trial in trials} == {("550.54", job.device)}
            assert len(trials) == 8
        refused = fleet.run(fleet.job(3, 8), excluded=["driver=535", "driver=550"])
    assert "no node of the cluster may make it" in of_kind(refused, Failed)[0].error
    fleet.require_order()


@pytest.mark.cluster
@pytest.mark.parametrize("killed", ["driver", "head"])
def test_a_run_whose_driver_or_head_is_killed_goes_on_when_it_is_started_again(fleet: RayFleet, killed: str) -> None:
    fleet.script(seconds=0.05)
    fleet.add_node(gpus=2)
    jobs = [fleet.job(1, trials=30), fleet.job(2, trials=30)]
    words = [str(fleet.folder), json.dumps([job.to_json() for job in jobs])]
    with subprocess.Popen([*program("ranks.ray_driver"), fleet.cluster.address, *words]) as driver:
        while sum(line.startswith("stored") for line in fleet.log) < 20:
            assert driver.poll() is None
            time.sleep(0.05)
        if killed == "driver":
            driver.kill()
        else:
            fleet.restart()
            fleet.add_node(gpus=2)
        assert driver.wait(60) != 0
    again = [*program("ranks.ray_driver"), fleet.cluster.address, *words]
    done = subprocess.run(again, capture_output=True, text=True, check=True, timeout=100)
    assert sorted(done.stdout.split()) == ["1", "2"]
    assert [len(fleet.stored(job)) for job in jobs] == [30, 30]
    fleet.require_order()


@pytest.mark.cluster
def test_an_object_store_that_others_fill_keeps_no_job_from_its_known_trials(fleet: RayFleet) -> None:
    import ray

    fleet.add_node()
    job = fleet.job(1, trials=100)
    with fleet.driver():
        held = [ray.put(bytes(OBJECT_STORE_BYTES // 2)) for _ in range(4)]  # twice what the store of a node takes
        assert len(of_kind(fleet.run(job), Finished)) == 1
        known = json.dumps(known_packed(fleet, job))
        assert len(known) > INLINE_BYTES  # so what the store knows travels as an object
        (finished,) = of_kind(fleet.run(fleet.job(1, trials=120)), Finished)
        assert len(held) == 4
    assert finished.report["resumed"] == 100
    assert len(fleet.stored(job)) == 120
    fleet.require_order()


def known_packed(fleet: RayFleet, job: Job) -> Any:
    with ResultStore.open(fleet.place, read_only=True) as store:
        return relevant_records(store, job)


@pytest.mark.cluster
def test_ctrl_c_and_a_time_budget_keep_what_was_found(fleet: RayFleet) -> None:
    fleet.script(seconds=0.1)
    fleet.add_node()
    jobs = [fleet.job(1, trials=1000), fleet.job(2, trials=1000)]
    with fleet.driver():
        executor, events = fleet.executor(), list[Event]()
        for event in executor.run(jobs):
            events.append(event)
            if isinstance(event, Advanced) and event.progress.done >= 5:
                executor.interrupt()
        assert [event.report["interrupted"] for event in of_kind(events, Finished)] == [True]
        assert not of_kind(events, Failed)
        begun = time.monotonic()
        events = fleet.run(*jobs, seconds=5)
        assert time.monotonic() - begun < 5 + INTERRUPT_SECONDS + 20  # what a busy machine takes to end it
    finished, failed = of_kind(events, Finished), of_kind(events, Failed)
    assert {event.job for event in (*finished, *failed)} == set(jobs)
    # by the end of the run, or before it by that of their own part of its time
    assert all(event.report["best"]["origin"] == "measured" for event in finished)
    assert all("before" in event.error for event in failed)
    fleet.require_order()


@pytest.mark.cluster
def test_workers_write_a_server_themselves(fleet: RayFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    need_server()
    monkeypatch.setattr("blocktune.tuner.cluster.executor.ReceivedRecords", None)  # nothing comes to the driver
    fleet.add_node(gpus=2)
    with running_server() as server:
        place = server.create_database("fleet")
        with ResultStore.open(place):
            pass
        jobs = [dataclasses.replace(fleet.job(batch, trials=8), database=place) for batch in (1, 2)]
        with fleet.driver():
            assert {event.job for event in of_kind(fleet.run(*jobs), Finished)} == set(jobs)
        with ResultStore.open(place, read_only=True) as store:
            assert len(store.trials()) == 16
            assert {best.shape.batch for best in store.bests()} == {1, 2}

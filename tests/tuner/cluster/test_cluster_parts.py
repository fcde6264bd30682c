"""What a run on a cluster is made of, without a cluster: time shares, blame, refusals, records on their way."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.records.records import Environment, Outcome, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels import registry
from blocktune.kernels.values.errors import StoreLockedError, UsageError
from blocktune.tuner.cluster.received_records import ReceivedRecords
from blocktune.tuner.cluster.task_record import TaskRecord
from blocktune.tuner.fleet.job import Job
from blocktune.tuner.fleet.preparation import RefusedError, prepare, require_exclusion, require_welcome
from blocktune.tuner.fleet.streamed_store import pack_records, relevant_records, store_of, unpack_records
from blocktune.tuner.fleet.time_shares import FINALS_SECONDS, TimeShares
from tests.support.models import landscape

pytestmark = pytest.mark.triton_free

FIRST, SECOND = landscape.SPACE.feasible[:2]
GPU = dataclasses.replace(landscape.DEVICE, uuid="GPU-1")


def trial(config: Any = FIRST, **changes: Any) -> Trial:
    made = dataclasses.replace(landscape.SUBJECT, device=GPU).trial(config, Outcome.OK, time_us=812.5)
    return dataclasses.replace(made, **changes)


def job(**changes: Any) -> Job:
    return Job(shape=landscape.SHAPE, device=GPU.key, **changes)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with ResultStore.open(tmp_path / "store.db") as store:
        yield store


def test_a_job_gets_its_part_of_the_time_that_is_left() -> None:
    now = 0.0
    shares = TimeShares(600, clock=lambda: now)
    assert shares.next(gpus=4, waiting=2) == 600 - FINALS_SECONDS  # no one else needs the GPU
    assert shares.next(gpus=4, waiting=40) == 60 - FINALS_SECONDS
    assert shares.next(gpus=1, waiting=60) == 5  # half of it where the finals would take all
    now = 500
    assert shares.next(gpus=4, waiting=8) == 50 - FINALS_SECONDS
    assert not shares.is_over
    now = 600
    assert shares.is_over
    assert TimeShares(None).next(4, 40) is None


def test_a_config_is_lethal_when_its_worker_died_or_its_node_went_twice() -> None:
    record = TaskRecord(job(), 0)
    for attempt, config, is_to_blame in (("a", FIRST, False), ("b", SECOND, True), ("c", None, True)):
        record.begin(attempt, "node", "worker")
        record.measuring = config
        record.lose("gone", is_to_blame=is_to_blame)
        assert record.attempt == ""
    assert record.lethal == (SECOND,)
    record.begin("d", "node", "worker")
    record.measuring = FIRST
    record.lose("gone", is_to_blame=False)
    assert set(record.lethal) == {FIRST, SECOND}
    now = record.as_of_now((), ("triton=3.5",), 30.0)
    assert (set(now.lethal), now.excluded, now.known, now.budget.seconds) == ({FIRST, SECOND}, ("triton=3.5",), (), 30)
    assert Job.from_json(now.to_json()) == now


@pytest.mark.parametrize(
    ("text", "refused"),
    [("triton=3.6", True), ("triton=3.6.0", True), ("triton=3", True), ("triton=3.60", False), ("driver=550", False)],
)
def test_an_excluded_version_stands_for_all_that_begin_with_it(text: str, refused: bool) -> None:
    here = Environment(triton="3.6.0", ptxas="12.8", torch="2.11", driver="550x.1")
    require_exclusion(text)
    if refused:
        with pytest.raises(RefusedError, match=r"but here is triton 3\.6\.0"):
            require_welcome((text,), here)
    else:
        require_welcome((text,), here)


@pytest.mark.parametrize("text", ["compiler=3", "triton", "triton=", "=3"])
def test_an_exclusion_names_software_and_a_version(text: str) -> None:
    with pytest.raises(UsageError, match="NAME=VERSION"):
        require_exclusion(text)


def test_what_killed_workers_counts_as_tried(store: ResultStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KERNELS", dict(landscape.KERNELS))
    prepare(job(lethal=(FIRST,)), GPU, store)
    (kept,) = store.trials(GPU, landscape.SHAPE)
    assert (kept.config, kept.outcome, kept.device.uuid) == (FIRST, Outcome.RUN_ERROR, "GPU-1")
    assert "a worker died" in kept.error


def test_records_arrive_as_they_were() -> None:
    sent = trial(samples_us=(1.0, 2.0), created_at=trial().created_at)
    (arrived,), bests = unpack_records(pack_records(GPU, [sent]))
    assert (arrived, bests) == (sent, [])


def test_a_worker_s_own_store_begins_with_what_is_known_and_sends_what_is_new(store: ResultStore) -> None:
    store.record(trial())
    store.record(trial(SECOND, imported=True))
    known = relevant_records(store, job())
    sent: list[dict[str, Any]] = []
    with store_of(job(known=known), sent.append) as own:
        assert [made.config for made in own.trials(GPU, landscape.SHAPE)] == [FIRST]
        assert sent == []
        own.with_timeout(1).put_all([trial(SECOND)], ())
    (message,) = sent
    assert unpack_records(message["records"])[0][0].config == SECOND
    assert relevant_records(store, dataclasses.replace(job(), device="nvidia x|9.0|1")) == ()


def test_what_a_locked_store_does_not_take_waits(store: ResultStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put_all = store.put_all

    def locked(*_: object) -> None:
        raise StoreLockedError("another one writes")

    with ReceivedRecords(store) as received:
        monkeypatch.setattr(store, "put_all", locked)
        received.add(pack_records(GPU, [trial()]))
        received.flush()
        received.add(pack_records(GPU, [trial(SECOND)]))
        received.flush()
        assert store.trials() == []
        monkeypatch.setattr(store, "put_all", put_all)
    assert {made.config for made in store.trials()} == {FIRST, SECOND}

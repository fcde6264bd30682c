"""The GPUs of a machine, shared by the worker processes of a test suite."""

import os

import pytest

from tests.support.fakes.fake_nvml import FakeNvml
from tests.support.suite import worker_gpus
from tests.support.suite.worker_gpus import VISIBLE, WORKER, in_turn, take_turns

pytestmark = pytest.mark.triton_free

FOUR = ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]


@pytest.fixture(autouse=True)
def second_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER, "gw5")
    monkeypatch.setenv(VISIBLE, "")  # is put back afterwards, as a variable that is only deleted would not be
    monkeypatch.delenv(VISIBLE)


def visible() -> str | None:
    take_turns()
    return os.environ.get(VISIBLE)


def test_each_worker_sees_all_gpus_and_another_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_turn(FOUR, 5) == ["GPU-1", "GPU-2", "GPU-3", "GPU-0"]
    assert {in_turn(FOUR, worker)[0] for worker in range(4)} == set(FOUR)
    monkeypatch.setattr(worker_gpus, "_uuids", lambda: FOUR)
    assert visible() == "GPU-1,GPU-2,GPU-3,GPU-0"


def test_a_choice_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_gpus, "_uuids", lambda: FOUR)
    monkeypatch.setenv(VISIBLE, "2")
    assert visible() == "2"


def test_one_gpu_or_one_process_needs_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml().install(monkeypatch)
    assert visible() is None
    monkeypatch.setattr(worker_gpus, "_uuids", lambda: FOUR)
    monkeypatch.delenv(WORKER)
    assert visible() is None

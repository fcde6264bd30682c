"""In which order a launch with hooks happens on the GPU, and when its round is taken again."""

import pytest
import torch

from blocktune.tuner.measure.clock import CudaClock, HookedLaunch

pytestmark = pytest.mark.triton_free


class Gpu:
    """Notes what is enqueued. late: how many turns the GPU catches up with the host."""

    def __init__(self, late: int = 0) -> None:
        self.log: list[str] = []
        self.late = late

    def zero_(self) -> None:
        self.log.append("flush")


class Event:
    gpu: Gpu
    count = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.place = 0.0

    def record(self) -> None:
        Event.count += 1
        self.place = float(Event.count)
        self.gpu.log.append("event")

    def query(self) -> bool:
        self.gpu.late -= 1
        return self.gpu.late >= 0

    def elapsed_time(self, end: "Event") -> float:
        return (end.place - self.place) / 1e3


class Stream:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def synchronize(self) -> None:
        self.gpu.log.append("wait")


class Launch(HookedLaunch):
    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def before(self) -> None:
        self.gpu.log.append(f"before {self.name}")

    def __call__(self) -> None:
        self.gpu.log.append(f"run {self.name}")

    def after(self) -> None:
        self.gpu.log.append(f"after {self.name}")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    Event.gpu = made
    properties = type("Properties", (), {"L2_cache_size": 50 << 20})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(made))
    monkeypatch.setattr(torch.cuda, "synchronize", None)  # waits for other streams, too
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", lambda size, **_: made if size == 100 << 20 else None)
    return made


def test_hooks_are_outside_of_the_time_and_turns_rotate(gpu: Gpu) -> None:
    launches = [Launch(gpu, name) for name in "ab"]
    rows = CudaClock().rounds(launches, 2)
    assert rows == ((1.0, 1.0),) * 2
    turn = ["before {0}", "flush", "flush", "event", "run {0}", "event", "after {0}"]
    a, b = ([word.format(name) for word in turn] for name in "ab")
    assert gpu.log == [*a, *b, "wait", *b, *a, "wait"]


def test_a_warm_cache_is_that_of_the_same_launch(gpu: Gpu) -> None:
    CudaClock("warm").rounds([Launch(gpu, "a")], 1)
    assert gpu.log == ["before a", "flush", "flush", "run a", "event", "run a", "event", "after a", "wait"]


def test_a_round_in_which_the_gpu_caught_up_is_taken_again_with_a_longer_head_start(gpu: Gpu) -> None:
    gpu.late = 2
    CudaClock().rounds([Launch(gpu, "a")], 1)
    assert gpu.log.count("run a") == 3
    assert gpu.log.count("flush") == 2 + 4 + 8
    gpu.late = 10**6
    gpu.log.clear()
    CudaClock().rounds([Launch(gpu, "a")], 1)
    assert gpu.log.count("run a") == 6  # a host that is never ahead: 2, 4, ... 64


def test_flushes_heat_in_place_of_a_launch_that_has_hooks(gpu: Gpu) -> None:
    CudaClock().heat(Launch(gpu, "a"), 0.01)
    assert set(gpu.log) == {"flush", "wait"}


def test_a_head_start_that_one_hiccup_made_long_becomes_short_again(gpu: Gpu) -> None:
    gpu.late = 1
    timed = CudaClock()
    timed.rounds([Launch(gpu, "a")], 33)
    gpu.log.clear()
    timed.rounds([Launch(gpu, "a")], 1)
    assert gpu.log.count("flush") == 2


def test_a_launch_without_hooks_shares_the_head_start_of_its_round(gpu: Gpu) -> None:
    CudaClock().rounds([lambda: gpu.log.append("run a"), lambda: gpu.log.append("run b")], 1)
    a, b = (["flush", "event", f"run {name}", "event"] for name in "ab")
    assert gpu.log == [*["flush"] * 4, *a, *b, "wait"]

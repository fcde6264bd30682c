"""The protocol's arithmetic, and that the clock notices when the GPU catches up with the host."""

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from blocktune.tuner.measure import clock as clocks
from blocktune.tuner.measure import protocol
from blocktune.tuner.search.finals import CHALLENGER_BAND

pytestmark = pytest.mark.triton_free


def test_short_kernels_get_more_rounds() -> None:
    assert protocol.candidate_rounds(10.0) == 30
    assert protocol.candidate_rounds(2_500.0) == 10
    assert protocol.candidate_rounds(1e6) == 5
    assert protocol.final_rounds([100.0] * 8) == 150
    assert protocol.final_rounds([1e5] * 8) == 15


def test_the_margin_of_the_race_leaves_room_for_the_finals() -> None:
    assert protocol.RACE_MARGIN > 1.05 * CHALLENGER_BAND
    assert protocol.CANDIDATE_ROUNDS[0] > protocol.RACE_ROUNDS
    assert [protocol.stopped_early((1.0,) * count) for count in (0, 2, 5)] == [False, True, False]


def test_ratios_are_taken_inside_a_round() -> None:
    rounds = ((10.0, 20.0), (11.0, 22.0), (30.0, 60.0))
    assert protocol.column(rounds, 1) == (20.0, 22.0, 60.0)
    assert protocol.median_ratio(protocol.column(rounds, 1), protocol.column(rounds, 0)) == 2.0


def test_the_order_rotates() -> None:
    assert [protocol.rotated_order(3, start) for start in range(4)] == [(0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 1, 2)]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 8])
def test_everyone_follows_everyone_equally_often(count: int) -> None:
    orders = [protocol.balanced_order(count, number) for number in range(count if count % 2 == 0 else 2 * count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert set(pairs) == set(itertools.permutations(range(count), 2))
    assert len(set(pairs.values())) <= 1


class FakeGpu:
    """A GPU that needs 30 us for a flush and 5 us for a launch, and a host that needs 50 us to enqueue a launch."""

    def __init__(self) -> None:
        self.host_us = 0.0
        self.gpu_us = 0.0
        self.idle_us = 0.0
        self.log: list[str] = []
        self.cuda = SimpleNamespace(
            Event=self.new_event,
            current_stream=lambda: SimpleNamespace(synchronize=self.synchronize),
            current_device=lambda: 0,
            get_device_properties=lambda index: SimpleNamespace(L2_cache_size=50 << 20),
        )
        self.uint8 = "uint8"

    def empty(self, size: int, **options: Any) -> Any:
        self.flush_bytes = size
        return SimpleNamespace(zero_=lambda: self.work("flush", host_us=2.0, gpu_us=30.0))

    def work(self, name: str, *, host_us: float, gpu_us: float) -> None:
        self.host_us += host_us
        self.idle_us += max(0.0, self.host_us - self.gpu_us)
        self.gpu_us = max(self.gpu_us, self.host_us) + gpu_us
        self.log.append(name)

    def new_event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=0.0)

        def record() -> None:
            event.at = self.gpu_us = max(self.gpu_us, self.host_us)

        event.record = record
        event.query = lambda: event.at <= self.host_us
        event.synchronize = lambda: self.wait_until(event.at)
        event.elapsed_time = lambda end: (end.at - event.at) / 1e3
        return event

    def wait_until(self, at_us: float) -> None:
        self.host_us = max(self.host_us, at_us)

    def synchronize(self) -> None:
        self.host_us = self.gpu_us = max(self.host_us, self.gpu_us)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setitem(__import__("sys").modules, "torch", gpu)
    return gpu


def test_launch_overhead_does_not_leak_in(gpu: FakeGpu) -> None:
    clock = clocks.CudaClock()
    launches = [lambda: gpu.work("a", host_us=50.0, gpu_us=5.0), lambda: gpu.work("b", host_us=50.0, gpu_us=8.0)]
    for row in clock.rounds(launches * 4, 3):
        assert row == pytest.approx((5.0, 8.0) * 4)
    assert gpu.flush_bytes == 100 << 20


def test_without_the_head_start_it_would(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "_MAX_ROUND_HEAD_START", 0)
    launch = [lambda: gpu.work("a", host_us=50.0, gpu_us=5.0)] * 8
    assert max(clocks.CudaClock().rounds(launch, 1)[0]) > 20.0


def test_every_launch_finds_a_cold_cache(gpu: FakeGpu) -> None:
    clock = clocks.CudaClock()
    clock.rounds([lambda: gpu.work("a", host_us=1.0, gpu_us=50.0)] * 3, 2)
    flushed = [before for before, name in zip(gpu.log, gpu.log[1:], strict=False) if name == "a"]
    assert flushed == ["flush"] * 6


def test_heating_is_by_time(gpu: FakeGpu) -> None:
    launches: list[int] = []
    clocks.CudaClock().heat(lambda: launches.append(1), 0.02)
    assert len(launches) >= 4


@pytest.fixture
def fake_time(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time as the host of the fake GPU has it."""
    monkeypatch.setattr(clocks.time, "monotonic", lambda: gpu.host_us / 1e6)


@pytest.mark.usefixtures("fake_time")
def test_a_load_never_pauses_while_it_is_timed(gpu: FakeGpu) -> None:
    launches = [lambda: gpu.work("a", host_us=10.0, gpu_us=500.0), lambda: gpu.work("b", host_us=10.0, gpu_us=800.0)]
    clock = clocks.CudaClock()
    clock.loaded_rounds(launches, 0.1)
    idle_us, began_us = gpu.idle_us, gpu.gpu_us
    rounds = clock.loaded_rounds(launches, 1.0)
    assert set(rounds) == {(500.0, 800.0)}
    assert len(rounds) > 300, "every other launch of 0.65 ms is timed"
    assert gpu.idle_us - idle_us < 100.0, "the GPU waits for the very first launch alone"
    assert gpu.gpu_us - began_us > 1e6

    idle_us = gpu.idle_us
    for _ in range(300):
        clock.rounds(launches, 1)
    assert gpu.idle_us - idle_us > 300.0, "rounds that the host waits for let the GPU rest"


@pytest.mark.usefixtures("fake_time")
def test_under_load_a_slow_host_does_not_leak_in_either(gpu: FakeGpu) -> None:
    launches = [lambda: gpu.work("a", host_us=1.0, gpu_us=20.0), lambda: gpu.work("b", host_us=60.0, gpu_us=10.0)]
    rounds = clocks.CudaClock().loaded_rounds(launches * 2, 0.05)
    assert len(rounds) >= clocks.MIN_LOADED_ROUNDS
    assert set(rounds) == {(20.0, 10.0) * 2}

"""A comparison on the CPU: who takes part, who is named as missing, how rounds are paired."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.db.records.records import Best, Environment, Outcome, Regime, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import competing, default_kernel, get_kernel
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.candidates.starting_configs import find_contenders
from blocktune.tuner.compare import line_up
from blocktune.tuner.compare.compare import compare, tune_command
from blocktune.tuner.compare.report import Comparison, timing_of
from blocktune.tuner.measure import protocol

DEVICE = device_named("h200")
SHAPE = AttentionShape(
    batch=1, num_heads=2, num_heads_kv=2, seqlen_q=64, seqlen_k=64, head_dim=64, head_dim_v=64, causal=Causal.UPPER_LEFT
)
TUNED = get_kernel("flash_fwd").default_config(SHAPE, DEVICE.limits)


class FakeClock:
    """Runs every launch once and gives it the time of its place in the line-up, which grows with every round."""

    def __init__(self) -> None:
        self.orders: list[tuple[Any, ...]] = []
        self.heated: list[float] = []
        self.loaded: list[float] = []

    def heat(self, launch: Callable[[], None], seconds: float) -> None:
        launch()
        self.heated.append(seconds)

    def rounds(self, launches: Sequence[Callable[[], None]], count: int) -> tuple[tuple[float, ...], ...]:
        if not self.orders:
            for launch in launches:
                launch()
            self.place = {id(launch): 100.0 * (number + 1) for number, launch in enumerate(launches)}
        self.orders.append(tuple(launches))
        drift = len(self.orders)
        return tuple(tuple(self.place[id(launch)] * drift for launch in launches) for _ in range(count))

    def loaded_rounds(self, launches: Sequence[Callable[[], None]], seconds: float) -> tuple[tuple[float, ...], ...]:
        self.loaded.append(seconds)
        return self.rounds(launches, 9)

    def synchronize(self) -> None:
        pass


def bind(config: KernelConfig, shape: AttentionShape) -> Launch:
    """A launcher that computes attention on the CPU; the default config's is wrong."""
    first = default_kernel(shape, DEVICE.limits)
    wrong = first is not None and config == first.default_config(shape, DEVICE.limits)

    def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> None:
        assert lse is None
        out.copy_(attention_reference(q, k, v, causal=shape.causal, scale=scale)[0] * (2 if wrong else 1))

    return launch


def right(config: KernelConfig, shape: AttentionShape) -> Launch:
    """A launcher that computes attention on the CPU, whatever the config."""

    def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> None:
        out.copy_(attention_reference(q, k, v, causal=shape.causal, scale=scale)[0])

    return launch


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ResultStore]:
    with ResultStore.open(tmp_path / "results.db") as opened:
        yield opened


def winner(**changes: Any) -> Best:
    best = Best(
        device=DEVICE,
        environment=Environment(triton="3.6.0", ptxas="12.8", torch="2.13"),
        shape=SHAPE,
        config=TUNED,
        kernel_hash=get_kernel("flash_fwd").source_hash,
        origin=Origin.MEASURED,
        time_us=10.0,
        trials=3,
    )
    return replace(best, **changes)


@pytest.fixture
def run(store: ResultStore, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Comparison]:
    monkeypatch.setattr(protocol, "REST_SECONDS", 1e-4)
    monkeypatch.setattr("blocktune.tuner.compare.compare.BACKENDS", {"cudnn": "MATH", "fa2": "NO_SUCH_BACKEND"})
    assert store.set_best(winner())

    def compared(**given: Any) -> Comparison:
        return compare(SHAPE, store=store, device=DEVICE, torch_device="cpu", bind=bind, **given)

    return compared


def test_everybody_is_checked_and_nobody_is_dropped_silently(run: Callable[..., Comparison]) -> None:
    comparison = run(clock=FakeClock())
    assert [entry.name for entry in comparison.entries] == ["tuned", "default", "paper", "cudnn", "fa2", "fa3", "fa4"]
    problems = {entry.name: entry.problem for entry in comparison.entries if entry.problem}
    assert set(problems) == {"default", "fa2", "fa3", "fa4"}
    assert "relative error" in problems["default"]
    assert "NO_SUCH_BACKEND" in problems["fa2"]
    assert "FlashAttention-4 cannot be imported: flash_attn.cute" in problems["fa4"]
    assert {entry.name for entry in comparison.entries if entry.timing} == {"tuned", "paper", "cudnn"}


def test_one_config_is_timed_once_by_whatever_names_it_takes_part(
    run: Callable[..., Comparison], store: ResultStore
) -> None:
    alone = FakeClock()
    run(clock=alone)
    paper = next(entry.config for entry in run(clock=FakeClock()).entries if entry.name == "paper")
    assert paper is not None
    assert store.set_best(winner(config=paper, kernel_hash=get_kernel(paper.kernel).source_hash, time_us=5.0))
    clock = FakeClock()
    timings = {entry.name: entry.timing for entry in run(clock=clock).entries}
    assert timings["paper"] == timings["tuned"] is not None
    assert {len(order) for order in clock.orders} == {len(alone.orders[0]) - 1}


@pytest.mark.parametrize("regime", Regime)
def test_times_go_to_whom_they_belong_whatever_the_order(run: Callable[..., Comparison], regime: Regime) -> None:
    clock = FakeClock()
    comparison = run(clock=clock, regime=regime)
    timings = {entry.name: entry.timing for entry in comparison.entries if entry.timing}
    tuned, cudnn = timings["tuned"], timings["cudnn"]
    assert tuned.over_cudnn is not None
    assert (tuned.over_cudnn.median, tuned.over_cudnn.low, tuned.over_cudnn.high) == pytest.approx((3.0, 3.0, 3.0))
    assert cudnn.over_cudnn is not None
    assert cudnn.over_cudnn.median == 1.0
    assert comparison.best_peer == comparison.to_json()["best_peer"] == "cudnn"
    assert tuned.over_best == tuned.over_cudnn
    assert tuned.tflops == pytest.approx(SHAPE.flops / tuned.median_us * 1e-6)
    assert line_up.ROUNDS[0] <= comparison.rounds <= line_up.ROUNDS[1]
    firsts = {order[0] for order in clock.orders}
    assert len(firsts) == (3 if regime is Regime.BURST else 1), "the clock itself rotates within one call"
    bursts = regime is Regime.BURST
    assert clock.heated == ([protocol.FINAL_HEAT_SECONDS[regime]] if bursts else [])
    assert clock.loaded == ([] if bursts else [*protocol.LOAD_SECONDS])
    assert comparison.load is not None
    assert comparison.to_json()["load"]["samples"] == comparison.load.samples >= 1


def test_a_backend_that_is_not_there_is_named(
    run: Callable[..., Comparison], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr("blocktune.tuner.compare.compare.BACKENDS", {"cudnn": "CUDNN_ATTENTION"})
    comparison = run(clock=FakeClock())
    cudnn, tuned = comparison.entry("cudnn"), comparison.entry("tuned")
    assert cudnn is not None
    assert cudnn.problem.startswith("RuntimeError")
    assert tuned is not None
    assert tuned.timing is not None
    assert tuned.timing.over_cudnn is tuned.timing.over_best is comparison.best_peer is None
    data = comparison.to_json()
    assert [entry["correct"] for entry in data["contenders"]] == [True, False, True, False, False, False]


def test_a_shape_that_was_not_tuned_is_compared_by_what_its_calls_get(store: ResultStore) -> None:
    expected = find_contenders(SHAPE, DEVICE, competing(), ()).untuned
    comparison = compare(SHAPE, store=store, device=DEVICE, torch_device="cpu", clock=FakeClock(), bind=right)
    assert comparison.entry("tuned") is None
    assert comparison.own is comparison.entry("untuned")
    assert comparison.own is not None
    assert comparison.own.config == expected
    assert comparison.own.timing is not None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"origin": Origin.PREDICTED, "time_us": None, "predicted_us": 9.0}, "only predicted"),
        ({"kernel_hash": "0" * 16}, "another source"),
    ],
    ids=("predicted", "stale"),
)
def test_a_shape_without_a_usable_winner_names_the_command(
    store: ResultStore, changes: dict[str, Any], reason: str
) -> None:
    assert store.set_best(winner(**changes))
    with pytest.raises(NoFeasibleConfigError, match=reason) as caught:
        compare(SHAPE, store=store, device=DEVICE, torch_device="cpu", clock=FakeClock(), bind=bind)
    assert "tune run --seq 64 --dim 64 --batch 1 --heads 2 --causal" in str(caught.value)


def test_the_command_names_what_differs_from_the_defaults() -> None:
    shape = complete_shape(512, 64, kv_heads=4, seq_k=1024, dim_v=128, dtype="fp16", causal="lower_right")
    assert tune_command(shape).endswith("--kv-heads 4 --seq-k 1024 --dim-v 128 --dtype fp16 --causal-lower-right")


def test_the_best_of_every_other_kernel_takes_part(run: Callable[..., Comparison], store: ResultStore) -> None:
    def record(name: str, time_us: float | None, block_n: int, **changes: Any) -> None:
        config = replace(get_kernel(name).default_config(SHAPE, DEVICE.limits), block_n=block_n)
        known = {"device": DEVICE, "environment": winner().environment, "shape": SHAPE, "config": config}
        known |= {"kernel_hash": get_kernel(name).source_hash, "outcome": Outcome.OK, "time_us": time_us}
        store.record(Trial(**known | changes))

    record("flash_fwd_tma", 9.0, 128)
    record("flash_fwd_tma", 7.0, 32)
    record("flash_fwd_tma", None, 64, outcome=Outcome.WRONG_RESULT)
    record("flash_fwd_hopper", 5.0, 64, kernel_hash="0" * 16)
    record("flash_fwd_tma", 6.0, 64, environment=replace(winner().environment, regime=Regime.BURST))
    record("flash_fwd", 1.0, 64)
    comparison = run(clock=FakeClock())
    assert [entry.name for entry in comparison.entries[2:5]] == ["paper", "flash_fwd_tma", "cudnn"]
    entry = comparison.entry("flash_fwd_tma")
    assert entry is not None
    assert entry.config is not None
    assert entry.config.block_n == 32
    assert entry.timing is not None


def test_a_lost_gpu_ends_the_comparison(run: Callable[..., Comparison]) -> None:
    clock = FakeClock()

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    clock.synchronize = lost  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(clock=clock)


def test_the_spread_is_that_of_the_rounds() -> None:
    own = [float(value) for value in range(1, 22)]
    timing = timing_of(own, [2.0 * value for value in own], [1.5 * value for value in own], flops=22)
    assert (timing.low_us, timing.median_us, timing.high_us) == (2.0, 11.0, 20.0)
    assert timing.over_cudnn is not None
    assert timing.over_cudnn.median == 2.0
    assert timing.over_best is not None
    assert timing.over_best.median == 1.5
    assert torch.isclose(torch.tensor(timing.tflops), torch.tensor(2e-6))


def test_standard_attention_takes_part_on_request(run: Callable[..., Comparison]) -> None:
    comparison = run(clock=FakeClock(), standard=True)
    standard = comparison.entry("standard")
    assert standard is not None
    assert standard.problem == ""
    assert standard.timing is not None

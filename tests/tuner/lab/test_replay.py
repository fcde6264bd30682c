"""Searches on recorded sweeps: the real search, the recorded times, and what is said about them."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from blocktune.db.records.records import Environment, Outcome, Trial
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.candidates.space import SearchSpace
from blocktune.tuner.cost.estimated_resources import estimated_resources
from blocktune.tuner.cost.model import predict_us
from blocktune.tuner.lab import replay_report
from blocktune.tuner.lab.racing import racing_row, racing_rows
from blocktune.tuner.lab.replay import WORKERS, Replay
from blocktune.tuner.lab.replay_report import MEASUREMENTS, ReplayReport, compare_strategies, model_rows
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.occupancy.calculator import occupancy
from blocktune.tuner.occupancy.compiled_code import CompiledCode

pytestmark = pytest.mark.triton_free

H200 = device_named("h200")
SHAPE = complete_shape(2048, 64)
KERNEL = get_kernel("flash_fwd")
SPACE = SearchSpace.build(SHAPE, H200.limits, [KERNEL])
ENVIRONMENT = Environment(triton="3.6.0", ptxas="12.8", torch="2.11")


def sweep(distort: Callable[[KernelConfig], float] = lambda config: 1.0, *, failing: int = 0) -> Sweep:
    """Every config of one kernel, as fast as the model says times a factor; some of the first cannot compile."""
    times: dict[KernelConfig, float] = {}
    for config in SPACE.feasible:
        resources = estimated_resources(KERNEL, config, SHAPE, H200)
        if occupancy(resources, H200.limits).blocks_per_sm:
            times[config] = predict_us(KERNEL, config, SHAPE, H200, CompiledCode(resources, None)) * distort(config)
    anchor = times[KERNEL.default_config(SHAPE, H200.limits)]
    trials = [
        Trial(
            device=H200,
            environment=ENVIRONMENT,
            shape=SHAPE,
            config=config,
            kernel_hash=KERNEL.source_hash,
            outcome=Outcome.COMPILE_ERROR if index < failing else Outcome.OK,
            resources=None if index < failing else estimated_resources(KERNEL, config, SHAPE, H200),
            time_us=None if index < failing else time_us,
            relative_to_anchor=None if index < failing else time_us / anchor,
            samples_us=() if index < failing else (time_us,) * 3,
            compile_seconds=1.0,
            bench_seconds=0.0 if index < failing else 0.25,
        )
        for index, (config, time_us) in enumerate(times.items())
    ]
    return Sweep(device=H200, environment=ENVIRONMENT, shape=SHAPE, trials=tuple(trials))


def rough(config: KernelConfig) -> float:
    """A factor that the model knows nothing of."""
    return 1.3 if config.num_stages != 3 else 1.0 + 0.1 * (config.block_n == 32)


def test_a_perfect_model_needs_one_measurement_beside_the_default() -> None:
    run = Replay(sweep()).run("model", seed=0, measurements=20)
    assert len(run.slowdowns) == 20
    assert list(run.slowdowns) == sorted(run.slowdowns, reverse=True)
    assert run.regret(3) == pytest.approx(
        0.0, abs=1e-9
    )  # the default, FlashAttention's heuristic, the model's favourite
    assert run.regret(1000) == run.regret(20)
    assert run.seconds_within(1e-9) == run.seconds(run.slowdowns.index(min(run.slowdowns)) + 1)
    assert run.seconds_within(-0.5) is None


def test_a_correction_beats_the_order_of_a_model_that_is_wrong() -> None:
    replay = Replay(sweep(rough))
    guided, model = (replay.run(name, seed=0, measurements=20) for name in ("guided", "model"))
    assert guided.regret(20) < 0.01
    assert guided.regret(20) <= model.regret(20)


def test_what_cannot_run_is_no_measurement() -> None:
    recorded = sweep(failing=40)
    run = Replay(recorded).run("enumeration", seed=0, measurements=500)
    assert len(run.slowdowns) <= len(recorded.timed)
    assert all(math.isfinite(slowdown) for slowdown in run.slowdowns)
    assert run.regret(500) == pytest.approx(0.0)


def test_time_is_that_of_compiling_in_parallel_and_measuring_in_turn() -> None:
    """All compile in a second, 15 at a time; the first is measured alone, the others are ready in batches."""
    run = Replay(sweep()).run("random", seed=0, measurements=40)
    assert run.seconds(1) == pytest.approx(1.25)
    steps = np.diff(run.ends)
    assert steps.min() == pytest.approx(0.25)
    assert 1.0 + 40 * 0.25 <= run.seconds(40) <= 1.0 + 40 * 0.25 + 40 / WORKERS


def test_trials_against_several_anchors_are_compared_by_their_times() -> None:
    recorded = sweep(rough)
    first = recorded.trials[0]
    mixed = replace(recorded, trials=(replace(first, relative_to_anchor=1.0), *recorded.trials[1:]))
    assert mixed.scores[first.config] == first.time_us
    assert recorded.scores[first.config] == first.relative_to_anchor


def test_the_report_says_how_far_how_sure_and_where_chance_does_as_well() -> None:
    recorded = [sweep(rough), replace(sweep(), shape=complete_shape(4096, 64))]
    report = compare_strategies(recorded, ["guided", "random", "tpe"], seeds=2).to_json()
    assert report["strategies"]["guided"]["seeds"] == 2
    assert [row["configs"] for row in report["sweeps"]] == [len(entry.trials) for entry in recorded]
    for row in report["strategies"].values():
        for count in MEASUREMENTS:
            found = row["regret"][str(count)]
            assert 0 <= found["low"] <= found["mean"] <= found["high"]
            assert found["median"] <= found["p95"]
        assert row["seconds"]["5"] < row["seconds"]["80"]
    assert (
        report["strategies"]["guided"]["regret"]["20"]["mean"] < report["strategies"]["random"]["regret"]["20"]["mean"]
    )
    assert report["random_as_good"] == []


def test_processes_search_alike() -> None:
    recorded = [sweep(rough)]
    alone, together = (compare_strategies(recorded, ["model", "random"], seeds=1, workers=count) for count in (1, 2))
    assert alone.to_json() == together.to_json()


def test_chance_is_as_good_where_all_are_equal() -> None:
    report: ReplayReport = compare_strategies([sweep(lambda config: 1.0)], ["guided", "random"], seeds=1)
    flat = replace(
        report.sweeps[0], trials=tuple(replace(trial, relative_to_anchor=1.0) for trial in report.sweeps[0].trials)
    )
    flat = replace(flat, trials=tuple(replace(trial, time_us=100.0) for trial in flat.trials))
    assert compare_strategies([flat], ["guided", "random"], seeds=1).random_as_good == [SHAPE.label]


def test_a_race_stops_the_slow_and_says_whom_it_would_have_stopped_wrongly() -> None:
    plain = sweep()
    best = min(plain.timed.values(), key=lambda trial: plain.scores[trial.config])
    others = [
        trial
        for trial in plain.trials
        if trial.outcome is Outcome.OK and plain.scores[trial.config] > 1.2 * plain.scores[best.config]
    ]
    assert best.time_us is not None
    unlucky = replace(best, samples_us=(1.3 * best.time_us,) * 2 + (best.time_us,) * 8)
    slow = replace(others[0], samples_us=(2 * best.time_us,) * 10)
    steady = replace(best, config=others[1].config, samples_us=(best.time_us,) * 10)
    race = replace(plain, trials=(unlucky, slow, steady))
    assert racing_row([race], 1.25) == {"margin": 1.25, "rounds_saved": 16 / 30, "close": 2, "stopped_close": 1}
    assert racing_row([race], 1.5) == {"margin": 1.5, "rounds_saved": 8 / 30, "close": 2, "stopped_close": 0}


def test_optunas_own_race_is_compared_with_ours() -> None:
    pytest.importorskip("scipy", reason="WilcoxonPruner needs scipy")
    plain = sweep()
    best = min(plain.timed.values(), key=lambda trial: plain.scores[trial.config])
    other = next(trial for trial in plain.trials if plain.scores[trial.config] > 1.5 * plain.scores[best.config])
    assert best.time_us is not None
    steady = replace(best, samples_us=tuple(best.time_us + number for number in range(10)))
    slow = replace(other, samples_us=tuple(2 * best.time_us + number for number in range(10)))
    (row,) = (row for row in racing_rows([replace(plain, trials=(steady, slow))]) if "p 0.1" in row.get("pruner", ""))
    assert row == {"pruner": "WilcoxonPruner, p 0.1", "rounds_saved": 6 / 20, "close": 1, "stopped_close": 0}


def test_the_model_is_judged_by_kernel_and_direction() -> None:
    rows = model_rows([Replay(sweep()), Replay(sweep(rough))])
    assert [(row["kind"], row["kernel"], row["sweeps"]) for row in rows] == [
        ("forward", None, 2),
        ("forward", "flash_fwd", 2),
    ]
    row = rows[0]
    assert row["rank_correlation"]["high"] == pytest.approx(1.0)
    assert row["rank_correlation"]["low"] < 0.99
    assert row["first_choice"]["low"] == pytest.approx(0.0, abs=1e-9)
    assert row["first_choice"]["high"] > row["best_of_8"]["high"] >= 0
    assert row["shared_exact"]["median"] == 1.0
    assert row["register_error"]["high"] == 0.0


def test_ranks_of_equals_are_equal() -> None:
    assert replay_report._ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]

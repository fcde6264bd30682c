"""Sweeps as cache files and T4 results of Kernel Tuner."""

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.records.records import Outcome
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.lab.sweep_file import Sweep, load_sweep
from blocktune.tuner.report.kernel_tuner import FAILURES, INVALIDITY, cache_files, t4_files

pytestmark = pytest.mark.triton_free

SWEEPS = Path(__file__).parents[3] / "results" / "sweeps"
REQUIRED = {
    "time": (int, float, str),
    "compile_time": (int, float),
    "verification_time": (int, float),
    "benchmark_time": (int, float),
    "strategy_time": (int, float),
    "framework_time": (int, float),
    "timestamp": str,
}
"""Fields of a cache entry with their types, by the schema of Kernel Tuner's cache files, 1.1.0."""


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    return load_sweep(SWEEPS / "h200-b4-h16-s4096-d128-bf16-causal-window-1023-1.sweep.json.gz")


def with_outcomes(sweep: Sweep, *outcomes: Outcome) -> Sweep:
    """The sweep with its first trials ended otherwise."""
    changed = [
        replace(trial, outcome=outcome, time_us=None, samples_us=())
        for trial, outcome in zip(sweep.trials, outcomes, strict=False)
    ]
    return replace(sweep, trials=(*changed, *sweep.trials[len(changed) :]))


def configs_in(cache: dict[str, Any]) -> dict[KernelConfig, Any]:
    """Times in milliseconds by config, as a reader of the file takes them."""
    return {
        KernelConfig.of(cache["kernel_name"], {name: entry[name] for name in cache["tune_params_keys"]}): entry["time"]
        for entry in cache["cache"].values()
    }


def test_cache_files_hold_every_config_with_its_time(sweep: Sweep) -> None:
    found: dict[KernelConfig, Any] = {}
    for text in cache_files(sweep).values():
        found |= configs_in(json.loads(text))
    assert found == {trial.config: pytest.approx((trial.time_us or 0) / 1e3) for trial in sweep.trials}


def test_a_cache_file_has_the_fields_of_the_schema(sweep: Sweep) -> None:
    for name, text in cache_files(sweep).items():
        cache = json.loads(text)
        assert name.endswith(f".{cache['kernel_name']}.cache.json")
        assert cache["schema_version"] == "1.1.0"
        assert (cache["device_name"], cache["shape"], cache["objective"]) == (sweep.device.name, sweep.label, "time")
        assert cache["problem_size"] == [4096, 16, 4]
        assert text.strip().endswith("}\n}")  # else a reader takes the file for one that is still written
        for key, entry in cache["cache"].items():
            assert key == ",".join(str(entry[parameter]) for parameter in cache["tune_params_keys"])
            assert all(isinstance(entry[field], kind) for field, kind in REQUIRED.items())
            assert datetime.fromisoformat(entry["timestamp"]).tzinfo is not None
            assert all(entry[parameter] in values for parameter, values in cache["tune_params"].items())


def test_what_failed_has_the_word_of_its_kind(sweep: Sweep) -> None:
    failed = with_outcomes(sweep, *FAILURES)
    caches = [json.loads(text) for text in cache_files(failed).values()]
    found = {config: time for cache in caches for config, time in configs_in(cache).items()}
    assert [found[trial.config] for trial in failed.trials[: len(FAILURES)]] == list(FAILURES.values())
    invalid = [result for text in t4_files(failed).values() for result in json.loads(text)["results"]]
    words = sorted(result["invalidity"] for result in invalid if not result["correctness"])
    assert words == sorted(INVALIDITY[outcome] for outcome in FAILURES)
    assert all(bool(result["measurements"]) == bool(result["correctness"]) for result in invalid)


def test_t4_results_hold_every_config_with_its_samples(sweep: Sweep) -> None:
    found: list[tuple[dict[str, int], list[float], float]] = []
    for text in t4_files(sweep).values():
        document = json.loads(text)
        assert document["schema_version"] == "1.0.0"
        for result in document["results"]:
            (measurement,) = result["measurements"]
            assert (measurement["name"], measurement["unit"]) == ("time", "ms")
            found.append((result["configuration"], result["times"]["runtimes"], measurement["value"]))
    expected = [
        (dict(trial.config.parameters), [sample / 1e3 for sample in trial.samples_us], (trial.time_us or 0) / 1e3)
        for trial in sorted(sweep.trials, key=lambda trial: trial.config.kernel)
    ]
    assert found == expected


def test_every_outcome_of_a_measured_trial_has_a_word() -> None:
    measured = set(Outcome) - {Outcome.PREDICTED}
    assert set(INVALIDITY) == measured
    assert set(FAILURES) == measured - {Outcome.OK}

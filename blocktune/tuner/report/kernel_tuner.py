"""A sweep in the file formats of Kernel Tuner, which its dashboard and its simulated searches read.

    for name, text in cache_files(sweep).items(): ...     # what tune_kernel(cache=...) keeps
    for name, text in t4_files(sweep).items(): ...        # the results of store_output_file

Both formats hold one kernel a file and times in milliseconds. Their schemas are `kernel_tuner/schema/cache/1.1.0` and
`kernel_tuner/schema/T4/1.0.0` of https://github.com/KernelTuner/kernel_tuner; T4 is the format of
https://github.com/odgaard/TuningSchema. What a search of ours does not take apart, such as the time of the strategy, is
0 in both.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blocktune.db.records.records import Outcome, Trial
from blocktune.kernels.files.foreign_text import shown
from blocktune.tuner.lab.sweep_file import SUFFIX, Sweep

CACHE_SCHEMA, T4_SCHEMA = "1.1.0", "1.0.0"

FAILURES = {
    Outcome.INFEASIBLE: "InvalidConfig",
    Outcome.COMPILE_ERROR: "CompilationFailedConfig",
    Outcome.COMPILE_TIMEOUT: "CompilationFailedConfig",
    Outcome.WRONG_RESULT: "RuntimeFailedConfig",
    Outcome.RUN_ERROR: "RuntimeFailedConfig",
    Outcome.RUN_TIMEOUT: "RuntimeFailedConfig",
}
"""What a cache file has in place of a time."""

INVALIDITY = {
    Outcome.OK: "correct",
    Outcome.INFEASIBLE: "constraints",
    Outcome.COMPILE_ERROR: "compile",
    Outcome.COMPILE_TIMEOUT: "timeout",
    Outcome.WRONG_RESULT: "correctness",
    Outcome.RUN_ERROR: "runtime",
    Outcome.RUN_TIMEOUT: "timeout",
}
"""What the T4 format calls an outcome."""

Files = dict[str, str]
"""Text by file name."""


def cache_files(sweep: Sweep) -> Files:
    """Return a cache file for every kernel of a sweep."""
    return _files(sweep, "cache", _cache)


def t4_files(sweep: Sweep) -> Files:
    """Return a file of T4 results for every kernel of a sweep."""
    return _files(sweep, "t4", _t4_results)


def _files(sweep: Sweep, kind: str, content: Callable[[Sweep, str, Sequence[Trial]], Mapping[str, Any]]) -> Files:
    stem = sweep.file_name.removesuffix(SUFFIX)
    by_kernel: dict[str, list[Trial]] = {}
    for trial in sweep.trials:
        by_kernel.setdefault(trial.config.kernel, []).append(trial)
    return {
        f"{stem}.{kernel}.{kind}.json": json.dumps(content(sweep, kernel, trials), indent=1, allow_nan=False) + "\n"
        for kernel, trials in sorted(by_kernel.items())
    }


def _cache(sweep: Sweep, kernel: str, trials: Sequence[Trial]) -> dict[str, Any]:
    names, shape = list(trials[0].config.parameters), sweep.shape
    return {
        "schema_version": CACHE_SCHEMA,
        "device_name": shown(sweep.device.name),
        "kernel_name": kernel,
        "problem_size": [shape.seqlen_q, shape.num_heads, shape.batch],  # up to three integers
        "shape": sweep.label,  # which readers pass over
        "tune_params_keys": names,
        "tune_params": {name: sorted({trial.config.parameters[name] for trial in trials}) for name in names},
        "objective": "time",
        "cache": {",".join(map(str, trial.config.parameters.values())): _cache_entry(sweep, trial) for trial in trials},
    }


def _cache_entry(sweep: Sweep, trial: Trial) -> dict[str, Any]:
    time_ms = _ms(trial.time_us)
    rate = {} if not trial.time_us else {"GFLOP/s": sweep.shape.flops / trial.time_us / 1e3}
    return {
        **trial.config.parameters,
        "time": time_ms if trial.outcome is Outcome.OK else FAILURES[trial.outcome],
        "times": [_ms(sample) for sample in trial.samples_us],
        **rate,
        "compile_time": 1e3 * trial.compile_seconds,
        "verification_time": 0,
        "benchmark_time": 1e3 * trial.bench_seconds,
        "strategy_time": 0,
        "framework_time": 0,
        "timestamp": trial.created_at.isoformat(sep=" "),
    }


def _t4_results(sweep: Sweep, kernel: str, trials: Sequence[Trial]) -> dict[str, Any]:
    return {"schema_version": T4_SCHEMA, "results": [_t4_result(sweep, trial) for trial in trials]}


def _t4_result(sweep: Sweep, trial: Trial) -> dict[str, Any]:
    correct = trial.outcome is Outcome.OK
    return {
        "timestamp": trial.created_at.isoformat(),
        "configuration": dict(trial.config.parameters),
        "objectives": ["time"],
        "times": {
            "compilation_time": 1e3 * trial.compile_seconds,
            "runtimes": [_ms(sample) for sample in trial.samples_us],
            "framework": 0,
            "search_algorithm": 0,
            "validation": 0,
        },
        "invalidity": INVALIDITY[trial.outcome],
        "correctness": float(correct),
        "measurements": [{"name": "time", "value": _ms(trial.time_us), "unit": "ms"}] if correct else [],
    }


def _ms(time_us: float | None) -> float:
    return (time_us or 0.0) / 1e3

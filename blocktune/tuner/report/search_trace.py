"""Searches as a trace that Perfetto, Chrome and TensorBoard's profiler show: https://ui.perfetto.dev.

A sweep is a process of the trace, a kernel one of its threads, and a trial a slice from the start of its measurement to
its end. Counters next to them are the best so far, and the state of the GPU. Compiling runs ahead of the measurements:
it is a number of a slice.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from blocktune.db.records.records import Trial
from blocktune.kernels.files.foreign_text import shown
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.report.trial_columns import in_order

Event = dict[str, Any]

MICROSECOND = timedelta(microseconds=1)
STATES = {"sm_clock_mhz": "SM clock, MHz", "temperature_c": "temperature, C", "power_w": "power, W"}
"""Counters by the field of a trial's telemetry."""


def search_trace(sweeps: Sequence[Sweep]) -> str:
    """Return the trace of all sweeps, as JSON in the Trace Event Format."""
    events = [event for number, sweep in enumerate(sweeps, 1) for event in _events(sweep, number)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False) + "\n"


def _events(sweep: Sweep, pid: int) -> Iterator[Event]:
    trials = in_order(sweep.trials)
    began = min(trial.created_at - timedelta(seconds=trial.bench_seconds) for trial in trials)
    tids = {name: tid for tid, name in enumerate(dict.fromkeys(trial.config.kernel for trial in trials), 1)}
    yield _named("process_name", f"{sweep.label} on {sweep.device.name}", pid)
    yield from (_named("thread_name", name, pid, tid) for name, tid in tids.items())
    yield from (_slice(trial, began, pid, tids[trial.config.kernel]) for trial in trials)
    yield from _best_so_far(sweep, trials, began, pid)
    for field, name in STATES.items():
        values = ((trial, getattr(trial.telemetry, field)) for trial in trials)
        yield from (_counter(name, value, _end_us(trial, began), pid) for trial, value in values if value is not None)


def _named(kind: str, name: str, pid: int, tid: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": shown(name)}}


def _slice(trial: Trial, began: datetime, pid: int, tid: int) -> Event:
    """Return the measurement of a trial."""
    facts = {"outcome": str(trial.outcome), "time_us": trial.time_us, "compile_seconds": trial.compile_seconds}
    duration = round(1e6 * trial.bench_seconds)
    return {
        "ph": "X",
        "name": trial.config.label,
        "cat": str(trial.outcome),
        "pid": pid,
        "tid": tid,
        "ts": _end_us(trial, began) - duration,
        "dur": duration,
        "args": facts | ({"error": shown(trial.error)} if trial.error else {}),
    }


def _best_so_far(sweep: Sweep, trials: Iterable[Trial], began: datetime, pid: int) -> Iterator[Event]:
    best = 0.0
    for trial in trials:
        rate = sweep.shape.flops / trial.time_us / 1e6 if trial.time_us else 0.0
        if rate > best:
            best = rate
            yield _counter("best, TFLOP/s", rate, _end_us(trial, began), pid)


def _counter(name: str, value: float, at_us: int, pid: int) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "ts": at_us, "args": {"value": value}}


def _end_us(trial: Trial, began: datetime) -> int:
    """Return when the measurement of a trial ended, in microseconds of the sweep."""
    return (trial.created_at - began) // MICROSECOND

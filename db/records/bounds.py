"""The bounds of every value in the store. They hold for what is written, for what is read, since the file may be
anyone's, and for what a document brings (db/exchange/importing.py).

Shapes, configs and devices bound themselves in their constructors.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from blocktune.db.records.records import Best, Environment, Outcome, Regime, Trial
from blocktune.db.records.user_records import UserBest, UserTrial
from blocktune.kernels.tuned.config import MAX_CONFIG_TEXT
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import UsageError

Range = tuple[float, float]

TIME_US: Range = (1e-3, 1e10)  # up to nearly three hours for one call
RATIO: Range = (1e-6, 1e6)
SECONDS: Range = (0, 1e7)
FRACTION: Range = (0, 1)
COUNT: Range = (0, 2**31 - 1)
POWER_W: Range = (0, 100_000)
BLOCKS_PER_SM: Range = (0, 1024)
TELEMETRY: Mapping[str, Range] = {
    "sm_clock_mhz": (0, 100_000),
    "memory_clock_mhz": (0, 100_000),
    "temperature_c": (0, 1000),
    "throttle_reasons": (0, 2**63 - 1),
    "other_processes": (0, 1_000_000),
}
"""Whole numbers; `power_w` is the one that is not."""
RESOURCES = ("registers", "shared_bytes", "static_shared_bytes", "stack_bytes", "spill_bytes", "num_warps", "barriers")

MAX_SAMPLES = 10_000
MAX_LIMITERS = 16
MAX_TEXT = 200
MAX_NAME = 256
MAX_ERROR = 1_000_000  # characters of what a compiler says

_SOURCE_HASH = re.compile("[0-9a-f]{16}")
_BEST_TIMES = ("time_us", "predicted_us", "default_time_us", "paper_time_us")
_BEST_RATIOS = ("speedup_over_default", "speedup_low", "speedup_high")


def require_sound_trial(trial: Trial) -> None:
    """Checks that every value of a trial is of its kind and in its range.

    Raises:
        UsageError: one is not.
    """
    _require_provenance(trial)
    _names(64, kernel_hash=trial.kernel_hash)
    _require_ending(trial)
    _numbers(TIME_US, predicted_us=trial.predicted_us)
    _numbers(FRACTION, occupancy=trial.occupancy)
    _numbers(SECONDS, compile_seconds=trial.compile_seconds, bench_seconds=trial.bench_seconds)
    _whole(BLOCKS_PER_SM, blocks_per_sm=trial.blocks_per_sm)
    if len(trial.limiters) > MAX_LIMITERS:
        raise _broken(f"up to {MAX_LIMITERS} limiters", "their number", len(trial.limiters))
    for limiter in trial.limiters:
        _names(32, limiters=limiter)
    _require_state(trial)


def require_sound_best(best: Best) -> None:
    """Checks that every value of a winner is of its kind and in its range.

    Raises:
        UsageError: one is not.
    """
    _require_provenance(best)
    _names(64, kernel_hash=best.kernel_hash)
    if best.origin is Origin.MEASURED and best.time_us is None:
        raise _broken("`time_us` when it was measured", "time_us", None)
    _numbers(TIME_US, **{name: getattr(best, name) for name in _BEST_TIMES})
    _numbers(RATIO, **{name: getattr(best, name) for name in _BEST_RATIOS})
    _whole(COUNT, trials=best.trials)


def require_sound_user_trial(trial: UserTrial) -> None:
    """Checks that every value of a tuned function's trial is of its kind and in its range.

    Raises:
        UsageError: one is not.
    """
    _require_provenance(trial)
    _require_function(trial)
    _require_ending(trial)
    _numbers(SECONDS, seconds=trial.seconds)


def require_sound_user_best(best: UserBest) -> None:
    """Checks that every value of a tuned function's winner is of its kind and in its range.

    Raises:
        UsageError: one is not.
    """
    _require_provenance(best)
    _require_function(best)
    if best.time_us is None:
        raise _broken("the time of a winner", "time_us", None)
    _numbers(TIME_US, time_us=best.time_us, default_time_us=best.default_time_us)
    _numbers(RATIO, **{name: getattr(best, name) for name in _BEST_RATIOS})
    _whole(COUNT, trials=best.trials)


def _require_function(record: UserTrial | UserBest) -> None:
    """Which function it is, and which source it had."""
    _names(MAX_NAME, kernel=record.config.kernel)
    if len(record.config.document) > MAX_CONFIG_TEXT:
        raise _broken(f"parameters of up to {MAX_CONFIG_TEXT} characters of JSON", "config", record.config.document)
    if not isinstance(record.source_hash, str) or not _SOURCE_HASH.fullmatch(record.source_hash):
        raise _broken("16 hexadecimal digits", "source_hash", record.source_hash)


def _require_ending(trial: Trial | UserTrial) -> None:
    """How the trial ended, and what was timed."""
    if not isinstance(trial.error, str) or len(trial.error) > MAX_ERROR:
        raise _broken(f"a text of up to {MAX_ERROR:,} characters", "error", trial.error)
    if (trial.outcome is Outcome.OK) != (trial.time_us is not None):
        raise _broken("`time_us` exactly when its outcome is ok", "time_us", trial.time_us)
    _numbers(TIME_US, time_us=trial.time_us)
    _numbers(RATIO, relative_to_anchor=trial.relative_to_anchor)
    if len(trial.samples_us) > MAX_SAMPLES:
        raise _broken(f"up to {MAX_SAMPLES:,} samples", "their number", len(trial.samples_us))
    for sample in trial.samples_us:
        _numbers(TIME_US, samples_us=sample)


def _require_provenance(record: Trial | Best | UserTrial | UserBest) -> None:
    _names(MAX_NAME, device=record.device.name)
    require_sound_environment(record.environment)
    if not isinstance(record.created_at, datetime) or record.created_at.tzinfo is None:
        raise _broken("a time with its zone", "created_at", record.created_at)


def require_sound_environment(environment: Environment) -> None:
    """Checks the versions of the software, as those of a trial or winner.

    Raises:
        UsageError: one is no printable text, or a number is out of range.
    """
    values = asdict(environment)
    if not isinstance(values.pop("regime"), Regime):
        raise _broken(f"one of the regimes {', '.join(Regime)}", "regime", environment.regime)
    _whole(COUNT, protocol=values.pop("protocol"))
    _whole(POWER_W, power_limit_w=values.pop("power_limit_w"))
    _names(MAX_TEXT, **values)


def _require_state(trial: Trial) -> None:
    """The compiled code's resources and the GPU's telemetry."""
    if trial.resources is not None:
        _whole(COUNT, **{name: getattr(trial.resources, name) for name in RESOURCES})
        _names(64, tensor_cores=trial.resources.tensor_cores, code_sha256=trial.resources.code_sha256)
    for name, limits in TELEMETRY.items():
        _whole(limits, **{name: getattr(trial.telemetry, name)})
    _numbers(POWER_W, power_w=trial.telemetry.power_w)


def _numbers(limits: Range, **values: Any) -> None:
    low, high = limits
    for name, value in values.items():  # NaN is in no range
        if value is not None and (type(value) not in (int, float) or not low <= value <= high):
            raise _broken(f"a number from {low:g} to {high:g}", name, value)


def _whole(limits: Range, **values: Any) -> None:
    low, high = limits
    for name, value in values.items():
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise _broken(f"an integer from {low:g} to {high:g}", name, value)


def _names(longest: int, **values: Any) -> None:
    """Texts for people. What a terminal would obey instead of showing has no place in them."""
    for name, value in values.items():
        if not isinstance(value, str) or len(value) > longest or not value.isprintable():
            raise _broken(f"a printable text of up to {longest} characters", name, value)


def _broken(rule: str, name: str, value: object) -> UsageError:
    return UsageError(f"A row must hold {rule}, but got {name}={value!r:.80}. Correct the value.")

"""The bounds of every value in the store. They hold for what is written, for what is read, since the file may be
anyone's, and for what a document brings (db/exchange/importing.py).

What was measured is bound by its columns (db/tables/columns.py); shapes, configs and devices bind themselves in their
constructors.
"""

import re
from datetime import datetime
from typing import Any

from blocktune.db.records.records import AnyBest, AnyTrial, Best, Environment, Outcome, Record, Regime
from blocktune.kernels.values.column_kinds import Kind, Prose, Real, Several, Whole, Word, columns_of
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.config import MAX_CONFIG_TEXT, KernelProblem, LaunchConfig

MAX_TEXT = 200
MAX_NAME = 256
POWER_W = Whole(0, 100_000)

_VERSIONS = ("triton", "ptxas", "torch", "cuda", "driver")
_SOURCE_HASH = re.compile("[0-9a-f]{16}")


def require_sound_trial(trial: AnyTrial) -> None:
    """Check that every value of a trial is of its kind and in its range.

    Raises:
        UsageError: one is not.
    """
    _require_provenance(trial)
    _require_outcome(trial)
    for record in (trial, trial.telemetry, trial.resources):
        if record is not None:
            _require_measured(record)


def require_sound_best(best: AnyBest) -> None:
    """Check that every value of a winner is of its kind and in its range.

    Raises:
        UsageError: one is not.
    """
    _require_provenance(best)
    if best.origin is Origin.MEASURED and best.time_us is None:
        raise _broken_rule("`time_us` when it was measured", "time_us", None)
    _require_measured(best)


def _require_kernel(record: Record) -> None:
    """Check which kernel it is, and which source it had. Those of attention check their names themselves."""
    if not isinstance(record.shape, KernelProblem):
        _require_text(64, kernel_hash=record.kernel_hash)
        return
    _require_text(MAX_NAME, kernel=record.shape.kernel)
    others = (record.default, record.paper) if isinstance(record, Best) else ()
    for config in (record.config, *(other for other in others if other is not None)):
        if not isinstance(config, LaunchConfig) or config.kernel != record.shape.kernel:
            raise _broken_rule(f"configs of the kernel {record.shape.kernel}", "config", config)
        if len(config.document) > MAX_CONFIG_TEXT:
            raise _broken_rule(f"parameters of up to {MAX_CONFIG_TEXT} characters of JSON", "config", config.document)
    if not isinstance(record.kernel_hash, str) or not _SOURCE_HASH.fullmatch(record.kernel_hash):
        raise _broken_rule("16 hexadecimal digits", "kernel_hash", record.kernel_hash)


def _require_outcome(trial: AnyTrial) -> None:
    """Check that what ended well, and nothing else, has a time."""
    if (trial.outcome is Outcome.OK) != (trial.time_us is not None):
        raise _broken_rule("`time_us` exactly when its outcome is ok", "time_us", trial.time_us)


def _require_provenance(record: Record) -> None:
    _require_kernel(record)
    _require_text(MAX_NAME, device=record.device.name)
    require_sound_environment(record.environment)
    if not isinstance(record.created_at, datetime) or record.created_at.tzinfo is None:
        raise _broken_rule("a time with its zone", "created_at", record.created_at)


def require_sound_environment(environment: Environment) -> None:
    """Check the versions of the software, as those of a trial or winner.

    Raises:
        UsageError: one is no printable text, or a number is out of range.
    """
    if not isinstance(environment.regime, Regime):
        raise _broken_rule(f"one of the regimes {', '.join(Regime)}", "regime", environment.regime)
    require_sound_value(Whole(), "protocol", environment.protocol)
    require_sound_value(POWER_W, "power_limit_w", environment.power_limit_w)
    _require_text(MAX_TEXT, **{name: getattr(environment, name) for name in _VERSIONS})


def _require_measured(record: Any) -> None:
    """Check every measured value of a record by what its column allows."""
    for column in columns_of(type(record)):
        value = getattr(record, column.name)
        if value is not None or not column.optional:
            require_sound_value(column.kind, column.name, value)


def require_sound_value(kind: Kind, name: str, value: Any) -> None:
    """Check that a value is of its kind and in its range.

    Raises:
        UsageError: it is not.
    """
    match kind:
        case Real():
            if type(value) not in (int, float) or not kind.low <= value <= kind.high:  # NaN is in no range
                raise _broken_rule(f"a number from {kind.low:g} to {kind.high:g}", name, value)
        case Whole():
            if type(value) is not int or not kind.low <= value <= kind.high:
                raise _broken_rule(f"an integer from {kind.low:g} to {kind.high:g}", name, value)
        case Word():
            _require_text(kind.longest, **{name: value})
        case Prose():
            if not isinstance(value, str) or len(value) > kind.longest:
                raise _broken_rule(f"a text of up to {kind.longest:,} characters", name, value)
        case Several():
            if not isinstance(value, tuple) or len(value) > kind.most:
                raise _broken_rule(f"up to {kind.most:,} values", name, value)
            for item in value:
                require_sound_value(kind.of, name, item)


def _require_text(longest: int, **values: object) -> None:
    """Check texts for people. What a terminal would obey instead of showing has no place in them."""
    for name, value in values.items():
        if not isinstance(value, str) or len(value) > longest or not value.isprintable():
            raise _broken_rule(f"a printable text of up to {longest} characters", name, value)


def _broken_rule(rule: str, name: str, value: object) -> UsageError:
    return UsageError(f"A row must hold {rule}, but got {name}={value!r:.80}. Correct the value.")

"""Turns rows of unknown quality, from a store or a results file, into recommendations."""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.store_reader.provenance import Identity, Reuse, present_identity, reuse_of
from blocktune.runtime.store_reader.tuned_config import ConfigT, ProblemT, TunedConfig

logger = logging.getLogger("blocktune")


def attention_config(row: Mapping[str, Any], device: DeviceSpec) -> TunedConfig | None:
    """Return a row as a recommendation for this device, or None when it has nothing to say about it.

    Raises:
        UsageError: a value breaks a rule; other wrong values raise what they like.
    """
    origin = Origin(row["origin"])
    if origin is Origin.DEFAULT or (origin is Origin.PREDICTED and row["device_key"] != device.key):
        return None  # a default needs no row, and a prediction is worth nothing elsewhere
    shape = AttentionShape.from_json(_document(row["shape"]))
    config = KernelConfig.from_json(_document(row["config"]))
    reuse = reuse_here(row, row["kernel_hash"], device, _kernel(config).source_hash)
    if origin is Origin.PREDICTED:
        reuse = None
    elif reuse is None:
        return None
    elif origin is Origin.BORROWED:
        reuse = Reuse.SAME_CAPABILITY  # stored without having been measured here
    elif origin is Origin.COMMUNITY:
        reuse = max(reuse, Reuse.OTHER_COMPILER, key=list(Reuse).index)  # agreed on, yet not measured here
    else:
        origin = origin_of(reuse)
    return TunedConfig(shape=shape, config=config, origin=origin, time_us=time_us_of(row["time_us"]), reuse=reuse)


Parse = Callable[[Mapping[str, Any], DeviceSpec], TunedConfig[ProblemT, ConfigT] | None]


def usable_rows(rows: Iterable[Mapping[str, Any]], device: DeviceSpec, *, where: str) -> list[TunedConfig]:
    """Return the rows of attention that serve this device, as `parsed_rows` does."""
    return parsed_rows(rows, device, attention_config, where=where)


def parsed_rows(
    rows: Iterable[Mapping[str, Any]], device: DeviceSpec, parse: Parse[ProblemT, ConfigT], *, where: str
) -> list[TunedConfig[ProblemT, ConfigT]]:
    """Return the rows that serve this device, its own first. What breaks a rule is left out and the first such row
    logged."""
    key = device.key
    own: list[TunedConfig[ProblemT, ConfigT]] = []
    others: list[TunedConfig[ProblemT, ConfigT]] = []
    broken: list[str] = []
    for row in rows:
        try:
            tuned = parse(row, device)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            broken.append(f"{type(error).__name__}: {error}")
        else:
            if tuned is not None:
                (own if row["device_key"] == key else others).append(tuned)
    if broken:
        logger.warning("%d row(s) of %s are ignored. The first: %.500s", len(broken), where, broken[0])
    return own + others


def reuse_here(row: Mapping[str, Any], measured_hash: object, device: DeviceSpec, kernel_hash: str) -> Reuse | None:
    """Return what a row's measurement, of one source of a kernel, is worth on a device with another one; None is
    nothing.

    Raises:
        UsageError: a value breaks a rule.
    """
    watts = row.get("power_limit_w", 0)  # older stores do not tell
    if type(watts) is not int or watts < 0:
        raise UsageError(f"`power_limit_w >= 0` must hold, but got {watts!r:.100}.")
    measured = Identity(
        kernel_hash=_text(measured_hash),
        power_limit_w=watts,
        **{field: _text(row[field]) for field in ("device_key", "triton", "ptxas", "driver")},
    )
    return reuse_of(measured, present_identity(device, kernel_hash))


def origin_of(reuse: Reuse) -> Origin:
    """Return where a config comes from whose measurement is worth this much."""
    return Origin.MEASURED if reuse is Reuse.EXACT else Origin.BORROWED


def _kernel(config: KernelConfig) -> Any:
    from blocktune.kernels.registry import get_kernel  # imports triton, so not before the first row

    kernel = get_kernel(config.kernel)
    unknown = set(config.parameters) - set(kernel.parameters)
    if unknown:
        raise UsageError(
            f"`{config.kernel}` has the parameters {sorted(kernel.parameters)}, but got {sorted(unknown)}."
        )
    return kernel


def _document(value: Any) -> dict[str, Any]:
    document = json.loads(value) if isinstance(value, str) else value
    if not isinstance(document, dict):
        raise UsageError(f"A shape or config must be a JSON object, but got {document!r:.100}.")
    return document


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"The device, kernel and software of a row must be texts, but got {value!r:.100}.")
    return value


def time_us_of(value: object) -> float | None:
    """Return the time in a row, if there is one.

    Raises:
        UsageError: it is not a positive number.
    """
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UsageError(f"`time_us > 0` must hold, but got {value!r}.")
    return float(value)

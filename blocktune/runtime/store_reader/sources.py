"""Where the dispatcher's configs come from: the user's store above the results that ship with the package.

A source is read in bulk, once per process and device. What it holds is data of unknown quality: every row passes
`usable_rows` before anything else sees it, and a source that cannot be read costs a warning, never a call.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from blocktune.kernels.files.file_path import file_path
from blocktune.kernels.files.foreign_text import shown
from blocktune.kernels.files.signature import trusted_key
from blocktune.kernels.files.variables import TRUSTED_KEY
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import BlocktuneError, StoreError, UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.store_reader.export_file import SUFFIX, autotuned_rows_in_file, rows_in_file, shipped_rows
from blocktune.runtime.store_reader.places import user_place, user_store_path
from blocktune.runtime.store_reader.provenance import Identity, Reuse, present_identity, reuse_of
from blocktune.runtime.store_reader.tuned_config import ConfigT, ProblemT, TunedConfig

logger = logging.getLogger("blocktune")


class ConfigSource(Protocol):
    """Anything that can recommend configs for a device.

    A class with an attribute `reads_files` that is true is read on a thread of its own; others on the calling thread.
    """

    def configs(self, device: DeviceSpec) -> Iterable[TunedConfig]:
        """Return all recommendations for this device, at most one for each shape and origin.

        Raises:
            StoreError: the source cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class _File:
    """A source in a file.

    Raises:
        UsageError: the path is invalid.
    """

    path: str | Path | None = None
    reads_files: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", None if self.path is None else file_path(self.path))


class SqliteConfigs(_File):
    """The bests of a SQLite store, read-only and without SQLAlchemy. None is the user's own store.

    Raises:
        UsageError: the path is invalid.
    """

    __slots__ = ()

    def configs(self, device: DeviceSpec) -> list[TunedConfig]:
        from blocktune.runtime.store_reader.store_file import (
            SqliteRows,  # needs `_sqlite3`, which a frozen file does not
        )

        path = user_store_path() if self.path is None else Path(self.path)
        return usable_rows(SqliteRows(path).read(device), device, where=str(path))


class JsonConfigs(_File):
    """The bests of a results file, as `tune freeze` and `tune export` write it. None is those that ship with the
    package.

    Raises:
        UsageError: the path is invalid.
    """

    __slots__ = ()

    def configs(self, device: DeviceSpec) -> list[TunedConfig]:
        named = shipped_rows() if self.path is None else [(str(self.path), rows_in_file(self.path))]
        return [tuned for name, rows in named for tuned in usable_rows(rows, device, where=name)]


@dataclass(frozen=True, slots=True)
class UserConfigs:
    """The bests of what BLOCKTUNE_DB names, a store or a results file (`*.json`); without it the user's own store."""

    reads_files: ClassVar[bool] = True

    def configs(self, device: DeviceSpec) -> list[TunedConfig]:
        path = user_place()
        return (JsonConfigs(path) if path.name.endswith(SUFFIX) else SqliteConfigs(path)).configs(device)


def autotuned_rows(device: DeviceSpec, path: str | Path | None = None, **values: str) -> list[dict[str, Any]]:
    """Return the winners of autotuned kernels in a store or results file, by default the user's own, that have these
    values in the `user_dispatch` view. Those of a store are of devices of this one's compute capability, its own first.

    Raises:
        StoreError: the place cannot be read, or is a results file that the owner of a trusted key did not sign.
        UsageError: the trusted key cannot be read.
    """
    place = user_place() if path is None else file_path(path)
    if place.name.endswith(SUFFIX):
        rows = autotuned_rows_in_file(place, signed_by=trusted_key())
        return [row for row in rows if values.items() <= row.items()]
    from blocktune.runtime.store_reader.store_file import SqliteRows  # needs `_sqlite3`, which a frozen file does not
    from blocktune.runtime.store_reader.store_views import USER_DISPATCH

    return SqliteRows(place, USER_DISPATCH).read(device, **values)


@dataclass(frozen=True, slots=True)
class LayeredConfigs:
    """Several sources, the most trusted first. One that cannot be read leaves the others standing.

    Raises:
        UsageError: a layer is no source.
    """

    layers: tuple[ConfigSource, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple):
            raise UsageError(
                f"`layers` must be a tuple of sources, but got {self.layers!r:.100}. Put them into a tuple."
            )
        for layer in self.layers:
            require_source(layer)

    def configs(self, device: DeviceSpec) -> list[TunedConfig]:
        found, problems = read_source(self, device)
        for problem in problems:
            logger.warning("%s", problem)
        return found


def require_source(source: object) -> None:
    """Check that configs can be read from this.

    Raises:
        UsageError: it is no source.
    """
    if isinstance(source, type) or not callable(getattr(source, "configs", None)):
        raise UsageError(
            f"A source of configs needs a method `configs(device)`, but got {source!r:.100}. Name a file by "
            'JsonConfigs("h200.json") or SqliteConfigs("blocktune.db").'
        )


def default_source() -> LayeredConfigs:
    """Return the user's store, or the results file that BLOCKTUNE_DB names, above the shipped results."""
    return LayeredConfigs((UserConfigs(), JsonConfigs()))


def layers_of(source: ConfigSource) -> tuple[ConfigSource, ...]:
    """Return the sources that a source consists of, the most trusted first."""
    return source.layers if isinstance(source, LayeredConfigs) else (source,)


def has_shipped(layers: Iterable[ConfigSource]) -> bool:
    """Return whether the results that ship with the package are among these."""
    return any(isinstance(layer, JsonConfigs) and layer.path is None for layer in layers)


def read_source(
    source: ConfigSource, device: DeviceSpec, *, signed_by: Path | None = None
) -> tuple[list[TunedConfig], list[str]]:
    """Return all rows of a source and what was wrong with it. Raise nothing: production code calls this.

    Any exception of a source is a problem to report, whatever its type: a source may be a user's own class.

    Args:
        source: what is read.
        device: what it is read for.
        signed_by: a public key; only results files that its owner signed are taken.
    """
    found: list[TunedConfig] = []
    problems: list[str] = []
    for layer in layers_of(source):
        try:
            found += layer.configs(device) if signed_by is None else _signed_configs(layer, device, signed_by)
        except BlocktuneError as error:
            problems.append(shown(str(error)))
        except Exception as error:
            problems.append(shown(f"{type(layer).__name__} cannot be read: {type(error).__name__}: {error}"))
    return found, problems


def _signed_configs(layer: ConfigSource, device: DeviceSpec, key: Path) -> list[TunedConfig]:
    """Return what a source recommends that a strict dispatcher with a trusted key may take.

    Raises:
        StoreError: the layer is no results file, or one that the owner of the key did not sign.
    """
    if not getattr(layer, "reads_files", False):
        return list(layer.configs(device))  # what the program itself hands over
    path = user_place() if isinstance(layer, UserConfigs) else getattr(layer, "path", None)
    if path is None or not str(path).endswith(SUFFIX):
        named = "the shipped results" if isinstance(layer, JsonConfigs) else path or type(layer).__name__
        raise StoreError(
            f"A strict dispatcher uses results files signed by the owner of {key} alone, and {named} is not one. Name "
            f"a signed file by BLOCKTUNE_DB, or unset {TRUSTED_KEY.name}."
        )
    return usable_rows(rows_in_file(path, signed_by=key), device, where=str(path))


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

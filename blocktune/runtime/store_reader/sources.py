"""Where the dispatcher's configs come from: the user's store above the results that ship with the package.

A source is read in bulk, once per process and device. What it holds is data of unknown quality: every row passes
`usable_rows` before anything else sees it, and a source that cannot be read costs a warning, never a call.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from blocktune.kernels.files.file_path import file_path
from blocktune.kernels.files.foreign_text import shown
from blocktune.kernels.files.signature import trusted_key
from blocktune.kernels.files.variables import TRUSTED_KEY
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import BlocktuneError, StoreError, UsageError
from blocktune.runtime.store_reader.export_file import SUFFIX, autotuned_rows_in_file, rows_in_file, shipped_rows
from blocktune.runtime.store_reader.places import user_place, user_store_path
from blocktune.runtime.store_reader.tuned_config import TunedConfig
from blocktune.runtime.store_reader.usable_rows import usable_rows

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

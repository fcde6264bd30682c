"""Corrections of a device's predicted times, from its measurements: the small file `DEVICE.correction.json`.

`tune lab calibrate` makes it of recorded sweeps and winners. For every measured shape it holds the times of configs
over that of the kernel's default there, measured and predicted, from which follows what the config does to another
shape. Logarithms are kept in thousandths.

Configs are kept relative to the default of the shape that they were measured for. A kernel names the parameters whose
best value follows from the shape (`follows_shape`), such as the number of splits, and its default computes them for
every shape. A winner of another shape says how many of the parameter's choices it was above or below the default there,
and that is what another shape takes over, never the value.

    there = relative_config(kernel, winner, kernel.default_config(shape, limits))    # splits: +1, twice the default's
    here = config_from(kernel, there, kernel.default_config(other, limits))
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import resources
from typing import Any, Self

from blocktune.kernels import registry
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.files.reading import read_resource
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.store_reader.export_file import SHIPPED_RESULTS

FORMAT, SCHEMA = "blocktune-correction", 2
SUFFIX = ".correction.json"
THOUSANDTHS = 1000.0

RelativeConfig = tuple[tuple[str, int], ...]
"""The parameters of a kernel, those that follow from the shape as steps from the default's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """How far a measurement of one shape holds for another. Spreads are of the logarithm of a time.

    noise: of a measurement. drift: what one doubling of the distance between two shapes adds. older: what a measurement
    of an older source of the kernel adds. prior, doubt: mean and spread of a config over the default, of which nothing
    was measured. shift: the share of a predicted change that is believed. caution: spreads that a config must be
    faster by.
    """

    noise: float = 0.01
    drift: float = 0.1
    older: float = 0.01
    prior: float = 0.05
    doubt: float = 0.1
    shift: float = 0.5
    caution: float = 1.0


@dataclass(frozen=True, slots=True)
class LogRatio:
    """A config's time over the default's of its kernel, or a default's over the first kernel's: logarithms."""

    measured: float
    predicted: float


class RatioTables(Mapping[str, Mapping[RelativeConfig, LogRatio]]):
    """The configs in a document by kernel, each table decoded when it is asked for: a first call needs few of them."""

    __slots__ = ("_decoded", "_tables")

    def __init__(self, tables: Mapping[str, Mapping[str, Any]]) -> None:
        self._tables = tables
        self._decoded: dict[str, Mapping[RelativeConfig, LogRatio]] = {}

    def __getitem__(self, kernel: str) -> Mapping[RelativeConfig, LogRatio]:
        if kernel not in self._decoded:
            self._decoded[kernel] = _decoded(self._tables[kernel])
        return self._decoded[kernel]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of one shape.

    first: the kernel whose default the others are compared with. level: the logarithm of measured over predicted time
    of that default. defaults: those of the kernels over the first one's. configs: those of a kernel over its default.
    hashes: the sources of the kernels that were measured.
    """

    shape: AttentionShape
    first: str
    level: float
    defaults: Mapping[str, LogRatio]
    configs: Mapping[str, Mapping[RelativeConfig, LogRatio]]
    hashes: Mapping[str, str] = field(default_factory=dict)

    def is_older(self, kernel: str) -> bool:
        """Return whether another source of a kernel was measured than today's; so it is where the kernel is gone."""
        if kernel not in self.hashes:
            return False
        return kernel not in registry.KERNELS or registry.KERNELS[kernel].source_hash != self.hashes[kernel]

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": self.shape.to_json(),
            "first": self.first,
            "level": _thousandths(self.level),
            "hashes": dict(self.hashes),
            "defaults": {name: _pair(ratio) for name, ratio in self.defaults.items()},
            "configs": {name: _table(ratios) for name, ratios in self.configs.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            shape=AttentionShape.from_json(data["shape"]),
            first=data["first"],
            level=data["level"] / THOUSANDTHS,
            defaults={name: _ratio(*pair) for name, pair in data["defaults"].items()},
            configs=RatioTables(data["configs"]),
            hashes=data["hashes"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCorrection:
    """All that was measured on one device, and how far it is trusted for other shapes."""

    device: str
    trust: Trust = field(default_factory=Trust)
    measured: tuple[Measured, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the correction in a document.

        Raises:
            UsageError: the document is of another format.
        """
        _with_format(data)
        return cls(
            device=data["device"],
            trust=Trust(**{name: data["trust"][name] for name in (one.name for one in fields(Trust))}),
            measured=tuple(map(Measured.from_json, data["measured"])),
        )


def correction_document(device: str, trust: Trust, measured: Iterable[Measured]) -> dict[str, Any]:
    """Return the document of a correction."""
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "device": device,
        "trust": asdict(trust),
        "measured": [one.to_json() for one in measured],
    }


def relative_config(kernel: AttentionKernel, config: KernelConfig, default: KernelConfig) -> RelativeConfig | None:
    """Return a config of a kernel by its steps from the default of its shape; None where it lacks a parameter or one
    that is counted in steps is no choice."""
    values, usual = config.parameters, default.parameters
    if values.keys() != kernel.parameters.keys():
        return None
    for name in kernel.follows_shape:
        choices = kernel.parameters[name]
        if values[name] not in choices or usual[name] not in choices:
            return None
        values[name] = choices.index(values[name]) - choices.index(usual[name])
    return tuple(values.items())


def config_from(kernel: AttentionKernel, relative: RelativeConfig, default: KernelConfig) -> KernelConfig:
    """Return the config that is these steps from a default, or as near as the choices reach."""
    values, usual = dict(relative), default.parameters
    for name in kernel.follows_shape:
        choices = kernel.parameters[name]
        place = choices.index(usual[name]) + values[name]
        values[name] = choices[min(max(place, 0), len(choices) - 1)]
    return KernelConfig.of(kernel.name, values)


@cache
def shipped_correction(device_key: str) -> DeviceCorrection | None:
    """Return the correction that ships for a device, else that of most shapes among those of its compute capability,
    or None.

    Raises:
        UsageError: a file of the package is broken.
    """
    documents = [
        _with_format(json.loads(read_resource(entry)))
        for entry in sorted(resources.files(SHIPPED_RESULTS).iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(SUFFIX)
    ]
    capability = device_key.split("|")[1]
    alike = [one for one in documents if one["device"].split("|")[1] == capability]
    own = next((one for one in alike if one["device"] == device_key), None)
    chosen = own or max(alike, key=lambda one: len(one["measured"]), default=None)
    return None if chosen is None else DeviceCorrection.from_json(chosen)


def measured_elsewhere(device_key: str) -> str:
    """Return the name of the other device that was measured for a device's correction; empty where it is itself."""
    correction = shipped_correction(device_key)
    return "" if correction is None or correction.device == device_key else correction.device.split("|")[0]


def _with_format(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a document of a correction.

    Raises:
        UsageError: it is of another format.
    """
    if (document.get("format"), document.get("schema")) != (FORMAT, SCHEMA):
        raise UsageError(
            f"A correction must have the format {FORMAT!r} and schema {SCHEMA}, but got "
            f"{document.get('format')!r:.80} and {document.get('schema')!r:.80}. Make it again by `tune lab calibrate`."
        )
    return document


def _thousandths(value: float) -> int:
    return round(value * THOUSANDTHS)


def _table(ratios: Mapping[RelativeConfig, LogRatio]) -> dict[str, Any]:
    """Return the configs of one kernel: the names of the parameters once, then a row of values and ratio for each, all
    rows in one text: a first call reads them by the thousand, and decodes few."""
    names = [name for name, _ in next(iter(ratios))]
    rows = ([*(value for _, value in config), *_pair(ratio)] for config, ratio in ratios.items())
    return {"parameters": names, "rows": " ".join(",".join(map(str, row)) for row in rows)}


def _decoded(table: Mapping[str, Any]) -> Mapping[RelativeConfig, LogRatio]:
    """Return the configs in a table."""
    found = {}
    for row in table["rows"].split():
        *values, measured, predicted = map(int, row.split(","))
        found[tuple(zip(table["parameters"], values, strict=True))] = _ratio(measured, predicted)
    return found


def _pair(ratio: LogRatio) -> tuple[int, int]:
    return _thousandths(ratio.measured), _thousandths(ratio.predicted)


def _ratio(measured: int, predicted: int) -> LogRatio:
    return LogRatio(measured / THOUSANDTHS, predicted / THOUSANDTHS)

"""A snapshot of a source's recommendations for this process's devices, as far as it has been read."""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from blocktune.kernels import registry
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.selection.fallback import ConfigTable
from blocktune.runtime.selection.pytorch_rival import rival_on
from blocktune.runtime.selection.untuned import Untuned, shipped_untuned
from blocktune.runtime.store_reader.background import MAX_SECONDS, BackgroundRead
from blocktune.runtime.store_reader.provenance import present_identity
from blocktune.runtime.store_reader.sources import ConfigSource, has_shipped, layers_of, read_source
from blocktune.runtime.store_reader.tuned_config import TunedConfig

logger = logging.getLogger("blocktune")

LayerRows = tuple[list[TunedConfig], list[str]]
"""The rows of a layer, and what was wrong with it."""

Layer = BackgroundRead[LayerRows] | LayerRows
"""A layer that is being read, or was."""


class DeviceConfigs:
    """The layers of a source for one device. Those that are files are read on threads of their own.

    Args:
        source: the source; it is read from now on.
        device: the device.
        changed: called on another thread when a layer has come after an answer was given without it.
        signed_by: a public key; only results files that its owner signed are taken.
    """

    def __init__(
        self, source: ConfigSource, device: DeviceSpec, changed: Callable[[], None], signed_by: Path | None = None
    ) -> None:
        self.device = device
        layers = layers_of(source)
        _learn_present_identity(device)
        self._names = [type(layer).__name__ for layer in layers]
        self._layers = [_begin_layer(layer, device, changed, signed_by) for layer in layers]
        self._there: tuple[bool, ...] | None = None
        self._table = ConfigTable(())
        self._untuned: Callable[[], Untuned | None] = _nothing
        self._rival: Callable[[AttentionShape], str | None] = _nobody
        if has_shipped(layers):
            self._untuned, self._rival = partial(shipped_untuned, device), rival_on(device)

    @property
    def late(self) -> int:
        """How many layers have come after an answer was given without them."""
        return sum(layer.is_late for layer in self._layers if isinstance(layer, BackgroundRead))

    def rows(self, seconds: float) -> LayerRows:
        """Return the rows that are there `seconds` after the reading began, and what is wrong or missing."""
        return self._merge_layers(self._layer_rows(seconds))

    def table(self, seconds: float) -> tuple[ConfigTable, tuple[str, ...]]:
        """Return `rows` as a table that is looked up by shape."""
        found = self._layer_rows(seconds)
        rows, problems = self._merge_layers(found)
        there = tuple(layer is not None for layer in found)
        if there != self._there:
            self._there, self._table = there, ConfigTable(rows, self._untuned, self._rival)
        return self._table, tuple(problems)

    def _layer_rows(self, seconds: float) -> list[LayerRows | None]:
        return [layer.value(seconds) if isinstance(layer, BackgroundRead) else layer for layer in self._layers]

    def _merge_layers(self, found: list[LayerRows | None]) -> LayerRows:
        rows: list[TunedConfig] = []
        problems: list[str] = []
        for name, layer in zip(self._names, found, strict=True):
            rows += layer[0] if layer else []
            problems += layer[1] if layer else [f"{name} is still being read, so nothing of it is used yet."]
        return rows, problems


def _nothing() -> Untuned | None:
    """Return what decides for shapes without a config where a source holds none of the shipped results."""
    return None


def _nobody(shape: AttentionShape) -> str | None:
    """Return that PyTorch's kernel is not expected to be faster: nothing is known of it."""
    del shape
    return None


def _learn_present_identity(device: DeviceSpec) -> None:
    """Find out what every row is compared with, once in a process. It takes longer than the reading, and may import
    modules, which a thread should not do while another one forks."""
    with suppress(Exception):  # the reader hits the same error and reports it
        from blocktune.runtime.store_reader import store_file  # noqa: F401

        for kernel in registry.KERNELS.values():
            present_identity(device, kernel.source_hash)


def _begin_layer(layer: ConfigSource, device: DeviceSpec, changed: Callable[[], None], signed_by: Path | None) -> Layer:
    """Return a layer that is being read; what it holds, if it is in memory or of a class that says nothing of
    threads."""

    def read() -> LayerRows:
        rows, problems = read_source(layer, device, signed_by=signed_by)
        for problem in problems:
            logger.warning("%s", problem)
        return rows, problems

    if not getattr(layer, "reads_files", False):
        return read()
    reading = BackgroundRead(read, changed)
    reading.begin()
    return reading


class Snapshot:
    """The configs of a source for every device seen so far. Not for several threads at once, except for `late`.

    Args:
        source: where they come from.
        changed: called with this snapshot, on another thread, when something has come after an answer was given
            without it.
        signed_by: a public key; only results files that its owner signed are taken.
    """

    def __init__(
        self, source: ConfigSource, changed: Callable[["Snapshot"], None], signed_by: Path | None = None
    ) -> None:
        self._source = source
        self._signed_by = signed_by
        self._changed = changed
        self._configs: dict[str, DeviceConfigs] = {}  # by DeviceSpec.key

    @property
    def devices(self) -> list[DeviceSpec]:
        """Return the devices whose reading has begun."""
        return [configs.device for configs in self._configs.values()]

    @property
    def late(self) -> int:
        """Counts what has come after an answer was given without it. Plans of a smaller count are out of date."""
        return sum(configs.late for configs in list(self._configs.values()))

    def begin(self, device: DeviceSpec) -> DeviceConfigs:
        """Return the configs for a device, whose reading has begun."""
        if device.key not in self._configs:
            self._configs[device.key] = DeviceConfigs(
                self._source, device, lambda: self._changed(self), self._signed_by
            )
        return self._configs[device.key]

    def table(self, device: DeviceSpec, seconds: float) -> tuple[ConfigTable, tuple[str, ...]]:
        """Return the configs for a device that are there `seconds` after their reading began, and what is wrong."""
        return self.begin(device).table(seconds)


def read_rows_within(
    source: ConfigSource, device: DeviceSpec, seconds: float = MAX_SECONDS, *, signed_by: Path | None = None
) -> LayerRows:
    """Return all rows of a source that can be read within `seconds`, and what is wrong or missing.

    signed_by: a public key; only results files that its owner signed are taken.
    """
    return DeviceConfigs(source, device, lambda: None, signed_by).rows(seconds)

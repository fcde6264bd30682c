"""The data that every view needs at once, made again only where the winners have changed: it takes a second of a large
store."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from blocktune.cli.report.page import json_text
from blocktune.cli.report.page_data import page_data
from blocktune.cli.report.sources import Sources, shipped_counters, shipped_documents
from blocktune.cli.shared.lookup import shipped_winners
from blocktune.cli.ui.forms import shape_fields
from blocktune.cli.ui.live_store import LiveStore
from blocktune.db.records.records import Best
from blocktune.db.tables.location import StoreTarget
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.runtime.store_reader.sources import ConfigSource, JsonConfigs, SqliteConfigs
from blocktune.runtime.store_reader.tuned_config import TunedConfig


@dataclass(frozen=True, slots=True)
class WinnerConfigs:
    """The winners of a database as the dispatcher wants them."""

    winners: Sequence[Best]

    def configs(self, device: DeviceSpec) -> list[TunedConfig]:
        """Return those of a device."""
        return [
            TunedConfig(shape=best.shape, config=best.config, origin=best.origin, time_us=best.time_us)
            for best in self.winners
            if best.device.key == device.key
        ]


class PageText:
    """The data of the views as JSON. Any thread may call it.

    Args:
        store: whose winners are shown next to those that ship.
        target: where it is.
        sources: what else is shown.
    """

    def __init__(self, store: LiveStore, target: StoreTarget, sources: Sources) -> None:
        self._store, self._target, self._sources = store, target, sources
        self._lock = threading.Lock()
        self._made: tuple[Any, str] | None = None

    def text(self) -> str:
        """Return the data as JSON."""
        with self._lock:
            mark, winners = self._store.winners()
            if self._made is None or self._made[0] != mark:
                self._made = mark, json_text(self._data(winners))
            return self._made[1]

    def _data(self, winners: Sequence[Best]) -> dict[str, Any]:
        named = self._sources
        sources = Sources(
            winners=[*winners, *named.winners],
            documents=[*named.documents, *shipped_documents()],
            misses=named.misses,
            counters={**named.counters, **shipped_counters()},
        )
        sources.add_shipped_winners(list(shipped_winners()))
        data = page_data(sources, self._layers(winners), now=datetime.now(UTC))
        return data | {"fields": shape_fields()}

    def _layers(self, winners: Sequence[Best]) -> list[ConfigSource]:
        """Return where the dispatcher would look for configs: the database, then what ships."""
        path = self._target.path
        own: list[ConfigSource] = [WinnerConfigs(winners) if path is None else SqliteConfigs(path)]
        return [*own, JsonConfigs()] if winners else [JsonConfigs()]

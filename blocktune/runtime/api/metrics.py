"""Counters of a dispatcher for Prometheus and OpenTelemetry.

    from prometheus_client import REGISTRY
    from blocktune.runtime.api.metrics import PrometheusCollector

    REGISTRY.register(PrometheusCollector())

Nothing is counted for this: plans count their calls anyhow, and are read when a number is wanted. Every value is one of
this process, so that a rank that decides otherwise than the others is seen by its digest.
"""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import needing
from blocktune.runtime.api.rank_sync import SyncedConfigs, config_digest
from blocktune.runtime.autotuned.frozen import known_rows
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention
from blocktune.runtime.dispatch.snapshot import Snapshot
from blocktune.runtime.selection import canary
from blocktune.runtime.selection.ladder import Rung
from blocktune.runtime.store_reader.tuned_config import TunedConfig


@dataclass(frozen=True, slots=True)
class Metrics:
    """calls: by source. misses: calls of shapes without a measurement of their own here. fallbacks: calls that PyTorch
    computed. disabled: configs that did not launch, or computed a wrong result. wrong: those of the latter kind.
    digests: of the recommendations and all that decides what they mean, by device; equal on ranks that decide alike."""

    calls: dict[str, int]
    misses: int
    disabled: int
    wrong: int
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def fallbacks(self) -> int:
        return self.calls[Rung.SDPA]


class MetricsReader:
    """Adds up the calls of a dispatcher's plans. Plans that were made and forgotten between two readings are missing.

    Args:
        dispatcher: what is read; by default that of `blocktune.attention`.
    """

    def __init__(self, dispatcher: Dispatcher = attention) -> None:
        self._dispatcher = dispatcher
        self._lock = threading.Lock()
        self._seen: dict[int, tuple[Any, int]] = {}  # plans, and how many of their calls were counted
        self._calls: Counter[str] = Counter({str(rung): 0 for rung in Rung if rung is not Rung.FROZEN})
        self._misses = 0
        self._digested: tuple[Any, dict[str, str]] | None = None

    def read(self) -> Metrics:
        """Return the numbers up to now. Reads nothing from disk, and makes no call wait."""
        resolver = self._dispatcher.resolver
        with self._lock:
            for plan in list(resolver.plans.values()):
                self._seen.setdefault(id(plan), (plan, 0))
            for name, entry in list(self._seen.items()):
                self._seen[name] = self._count(*entry)
            living = {id(plan) for plan in list(resolver.plans.values())}
            self._seen = {name: entry for name, entry in self._seen.items() if name in living}
            digests = self._digests(resolver.snapshot)
            return Metrics(dict(self._calls), self._misses, resolver.disabled, canary.counts["wrong"], digests)

    def _count(self, plan: Any, before: int) -> tuple[Any, int]:
        calls = plan.calls
        self._calls[str(plan.explanation.rung)] += calls - before
        if plan.explanation.shape is not None and not plan.explanation.is_measured_here:
            self._misses += calls - before
        return plan, calls

    def _digests(self, snapshot: Snapshot) -> dict[str, str]:
        """Return the digests of all devices seen so far. They are made again only when something else has been read."""
        rows = {device: snapshot.begin(device).rows(0.0)[0] for device in snapshot.devices}
        state = snapshot, tuple((device.key, len(found)) for device, found in rows.items())
        if self._digested is None or self._digested[0] != state:
            made = {device.key: self._digest(device, found) for device, found in rows.items()}
            self._digested = state, made
        return self._digested[1]

    def _digest(self, device: DeviceSpec, rows: list[TunedConfig]) -> str:
        synced = SyncedConfigs(device.key, tuple(rows))
        return config_digest(synced, device, self._dispatcher.strict, known_rows(device))


class PrometheusCollector:
    """A collector for a registry of `prometheus_client`.

    Raises:
        MissingPackageError: `prometheus_client` is not installed.
    """

    def __init__(self, dispatcher: Dispatcher = attention) -> None:
        with needing("metrics", "A collector"):
            from prometheus_client import core
        self._core = core
        self._reader = MetricsReader(dispatcher)

    def collect(self) -> Iterable[Any]:
        """Yield the families of metrics; the registry calls this."""
        found, core = self._reader.read(), self._core
        calls = core.CounterMetricFamily(
            "blocktune_calls", "Calls of attention by source of the config.", labels=["rung"]
        )
        for rung, count in found.calls.items():
            calls.add_metric([rung], count)
        yield calls
        yield core.CounterMetricFamily("blocktune_misses", _MISSES, value=found.misses)
        yield core.CounterMetricFamily("blocktune_fallbacks", _FALLBACKS, value=found.fallbacks)
        yield core.GaugeMetricFamily("blocktune_disabled_configs", _DISABLED, value=found.disabled)
        yield core.CounterMetricFamily("blocktune_wrong_configs", _WRONG, value=found.wrong)
        digests = core.GaugeMetricFamily("blocktune_configs", _DIGEST, labels=["device", "digest"])
        for device, digest in found.digests.items():
            digests.add_metric([device, digest], 1)
        yield digests


_MISSES = "Calls of shapes that have no measurement of their own on this device."
_FALLBACKS = "Calls that PyTorch computed."
_DISABLED = "Configs that did not launch, or computed a wrong result."
_WRONG = "Configs whose first use differed from attention."
_DIGEST = "The digest of what this process recommends; equal on ranks that decide alike."


def observe_with_opentelemetry(meter: Any, dispatcher: Dispatcher = attention) -> None:
    """Make observable instruments of a meter of OpenTelemetry, which reads the numbers at every export.

    Raises:
        MissingPackageError: `opentelemetry-api` is not installed.
    """
    with needing("metrics", "A meter"):
        from opentelemetry.metrics import Observation
    reader = MetricsReader(dispatcher)

    def calls(_: object) -> list[Any]:
        return [Observation(count, {"rung": rung}) for rung, count in reader.read().calls.items()]

    def digests(_: object) -> list[Any]:
        found = reader.read().digests
        return [Observation(1, {"device": device, "digest": digest}) for device, digest in found.items()]

    def one(name: str) -> Any:
        return lambda _: [Observation(getattr(reader.read(), name))]

    meter.create_observable_counter(
        "blocktune.calls", [calls], description="Calls of attention by source of the config."
    )
    meter.create_observable_counter("blocktune.misses", [one("misses")], description=_MISSES)
    meter.create_observable_counter("blocktune.fallbacks", [one("fallbacks")], description=_FALLBACKS)
    meter.create_observable_gauge("blocktune.disabled_configs", [one("disabled")], description=_DISABLED)
    meter.create_observable_counter("blocktune.wrong_configs", [one("wrong")], description=_WRONG)
    meter.create_observable_gauge("blocktune.configs", [digests], description=_DIGEST)

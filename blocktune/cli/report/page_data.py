"""The data that the page needs at once: charts, limits, winners and the views of all documents."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from blocktune.cli.report.document_views import VIEWS, view_of
from blocktune.cli.report.shape_views import difference_view, kernel_view, misses_view, rungs, winner_view
from blocktune.cli.report.sources import Sources

if TYPE_CHECKING:
    from blocktune.runtime.store_reader.sources import ConfigSource
    from blocktune.tuner.lab.sweep_file import Sweep
    from blocktune.tuner.profile.counter_file import CounterFile

THROTTLED = {
    0x02: "clocks set by an application",
    0x04: "at the power limit",
    0x08: "slowed by the hardware",
    0x20: "slowed because of heat",
    0x40: "slowed by the hardware because of heat",
    0x80: "slowed by the power supply",
}
"""Bits of NVML's clock event reasons (nvml.h) that change times, in words."""


def page_data(sources: Sources, layers: "Sequence[ConfigSource]", *, now: datetime) -> dict[str, Any]:
    """Return plain values.

    Args:
        sources: of the report.
        layers: where the dispatcher would look for configs.
        now: when the report is made.
    """
    from blocktune.cli.report.charts.all_charts import all_charts
    from blocktune.cli.report.charts.style import BRIGHTER, theme
    from blocktune.kernels.hardware.device import present_devices
    from blocktune.tuner.report.device_table import HARDWARE, device_choices, limits_table

    views = {kind: [view_of(document) for document in sources.documents_of_kind(kind)] for kind in VIEWS}
    return {
        "created_at": now.isoformat(timespec="minutes"),
        "gpus": [device.name for device in present_devices()],
        "hardware": HARDWARE,
        "limits": limits_table(),
        "devices": device_choices(),
        "charts": all_charts(),
        "brighter": BRIGHTER,
        "themes": {"light": theme(dark=False), "dark": theme(dark=True)},
        "throttled": {str(bit): words for bit, words in THROTTLED.items()},
        "sweeps": [_headline(sweep) for sweep in sources.sweeps],
        "winners": _winners(sources),
        "kernels": [kernel_view(*kernel) for kernel in sources.kernels],
        "rungs": _rungs(sources, layers),
        "misses": [view for device in sources.devices for view in misses_view(device, sources.misses)],
        "differences": _differences(sources),
        "counters": [_counters(name, file) for name, file in sources.counters.items()],
        **views,
    }


def _winners(sources: Sources) -> list[dict[str, Any]]:
    """Return the winners, those that come with the package last and marked."""
    own = len(sources.winners) - sources.shipped
    return [winner_view(best, ships=place >= own) for place, best in enumerate(sources.winners)]


def _headline(sweep: "Sweep") -> dict[str, Any]:
    """Return what names a sweep before it is unpacked."""
    return {"label": sweep.label, "shape_label": sweep.shape.label, "device": sweep.device.name}


def _counters(name: str, file: "CounterFile") -> dict[str, Any]:
    """Return every prediction of a recorded config next to its counter, and what its warps waited for."""
    from blocktune.tuner.cost.term_texts import terms_of

    analysis, terms = file.analysis, terms_of(file.analysis.shape)
    return {
        "name": name,
        "device": analysis.device.name,
        "label": analysis.shape.label,
        "direction": str(analysis.shape.direction),
        "flops": analysis.shape.flops,
        "config": analysis.config.label,
        "recorded_on": file.recorded_on,
        "launches": [launch.kernel for launch in file.counters.launches],
        "rows": [row.to_json() for row in file.rows()],
        "stalls": [stall.to_json() | {"words": terms.get(stall.term, "").partition(":")[0]} for stall in file.stalls()],
    }


def _rungs(sources: Sources, layers: "Sequence[ConfigSource]") -> dict[str, dict[str, str]]:
    """Return the sources by device and shape."""
    return {device.name: rungs(device, sources.shapes, layers) for device in sources.devices}


def _differences(sources: Sources) -> list[dict[str, Any]] | None:
    """Return the none where there is nothing to compare with."""
    from blocktune.db.exchange.differences import differences

    if sources.before is None:
        return None
    return [difference_view(each) for each in differences(sources.before, sources.winners)]

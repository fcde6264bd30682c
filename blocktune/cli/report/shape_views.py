"""Shapes of a report: the winner of each, which source answers a call, how often it was missed, what changed."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.cost.bands import predicted_text
from blocktune.tuner.report.importance import importance_text, kernel_importance

if TYPE_CHECKING:
    from blocktune.db.exchange.differences import WinnerDifference
    from blocktune.db.records.records import Best, KernelBest, KernelTrial
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.runtime.store_reader.sources import ConfigSource

View = dict[str, Any]


def kernel_view(best: "KernelBest", trials: "Sequence[KernelTrial]") -> View:
    """Return the winner of an autotuned kernel with what it was compared with, and which parameters decide."""
    return {
        "kernel": best.config.kernel,
        "key": best.shape.label,
        "device": best.device.name,
        "config": best.config.label.partition(" ")[2],
        "time_us": best.time_us,
        "default": "" if best.default is None else best.default.label.partition(" ")[2],
        "over_default": best.speedup_over_default,
        "configs": best.trials,
        "importance": importance_text(kernel_importance(trials)),
    }


def winner_view(best: "Best", *, ships: bool = False) -> View:
    """Return a winner with what it was compared with, and whether it comes with the package."""
    return {
        "ships": ships,
        "label": best.shape.label,
        "shape": best.shape.to_json(),
        "device": best.device.name,
        "config": best.config.label,
        "origin": str(best.origin),
        "time_us": best.time_us,
        "predicted": predicted_text(best.predicted_us, best.config.kernel, best.shape, best.device),
        "default": "" if best.default is None else best.default.label,
        "default_us": best.default_time_us,
        "over_default": best.speedup_over_default,
        "low": best.speedup_low,
        "high": best.speedup_high,
        "trials": best.trials,
        "regime": str(best.environment.regime),
        "created_at": best.created_at.isoformat(),
    }


def rungs(device: "DeviceSpec", shapes: Iterable[AttentionShape], layers: "Sequence[ConfigSource]") -> dict[str, str]:
    """Return the source of the dispatcher's ladder that answers each shape, by the shape's label.

    Args:
        device: for which calls are made.
        shapes: of the calls.
        layers: where stored configs come from, the first one first.
    """
    from blocktune.runtime.selection.fallback import ConfigTable, climb_down
    from blocktune.runtime.selection.ladder import Candidate, Rung
    from blocktune.runtime.selection.pytorch_rival import rival_on
    from blocktune.runtime.selection.untuned import shipped_untuned
    from blocktune.runtime.store_reader.sources import LayeredConfigs, has_shipped

    rows = LayeredConfigs(tuple(layers)).configs(device)
    table = ConfigTable(rows)
    if has_shipped(layers):
        table = ConfigTable(rows, partial(shipped_untuned, device), rival_on(device))
    found = {}
    for shape in shapes:
        steps = climb_down(table, shape, device.limits)
        answer = next((step for step in steps if isinstance(step, Candidate)), None)
        found[shape.label] = str(Rung.SDPA if answer is None else answer.rung)
    return found


def misses_view(device: "DeviceSpec", misses: Mapping[tuple[str, AttentionShape], int]) -> list[View]:
    """Return how often each shape was called on a device without a measurement of its own."""
    return [
        {"label": shape.label, "shape": shape.to_json(), "calls": calls}
        for (key, shape), calls in misses.items()
        if key == device.key
    ]


def difference_view(each: "WinnerDifference") -> View:
    """Return how the winner of a shape differs from the one before."""
    before, after = each.before, each.after
    return {
        "label": each.winner.shape.label,
        "device": each.winner.device.name,
        "change": str(each.change),
        "before": "" if before is None else before.config.label,
        "after": "" if after is None else after.config.label,
        "before_us": None if before is None else before.time_us,
        "after_us": None if after is None else after.time_us,
        "ratio": each.ratio,
    }

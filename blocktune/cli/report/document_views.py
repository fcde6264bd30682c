"""Benches, ladders, replays and the noise of a GPU in the report: rows of plain values."""

from collections.abc import Callable, Mapping
from typing import Any

from blocktune.cli.report.sources import Document
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compare.report import fastest_peer, out_of_the_box
from blocktune.tuner.cost.bands import stored_band_text

View = dict[str, Any]


def view_of(document: Document) -> View:
    """Return the view of a document.

    Raises:
        UsageError: a field is missing or of another type.
    """
    try:
        return {"name": document.name} | VIEWS[document.kind](document.content)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UsageError(
            f"{document.name} is not a {document.kind} file as blocktune writes it: {type(error).__name__} {error}. "
            "Write it again, or leave it out."
        ) from error


def _bench(content: Mapping[str, Any]) -> View:
    return _origin(content) | {
        "regime": content["regime"],
        "rows": [_bench_row(row) for row in content["rows"]],
    }


def _bench_row(row: Mapping[str, Any]) -> View:
    shape = AttentionShape.from_json(row["shape"])
    contenders = [_contender(entry) for entry in row["contenders"] if entry["timing"] is not None]
    times = {entry["name"]: float(entry["time_us"]) for entry in contenders}
    peer, own_us = fastest_peer(times), times.get(out_of_the_box(times))
    return {
        "label": shape.label,
        "shape": shape.to_json(),
        "contenders": contenders,
        "peer": peer,
        "over_peer": _ratio(None if peer is None else times[peer], own_us),
        "over_default": _ratio(times.get("default"), own_us),
        "before": row.get("before"),
        "after": row.get("after"),
    }


def _contender(entry: Mapping[str, Any]) -> View:
    timing, config = entry["timing"], entry.get("config")
    return {
        "name": entry["name"],
        "config": "" if config is None else KernelConfig.from_json(config).label,
        "time_us": timing["median_us"],
        "low_us": timing["low_us"],
        "high_us": timing["high_us"],
        "tflops": timing["tflops"],
    }


def _ratio(slow_us: float | None, fast_us: float | None) -> float | None:
    return None if not slow_us or not fast_us else slow_us / fast_us


def _ladder(content: Mapping[str, Any]) -> View:
    return _origin(content) | {"rows": [_climb(row) for row in content["rows"]]}


def _climb(row: Mapping[str, Any]) -> View:
    shape = AttentionShape.from_json(row["shape"])
    steps = [_step(step) for step in row["steps"]]
    return {
        "label": shape.label,
        "direction": str(shape.direction),
        "origin": row["origin"],
        "flops": shape.flops,
        "steps": steps,
    }


def _step(step: Mapping[str, Any]) -> View:
    timing, config = step["timing"], step["config"]
    return {
        "name": step["name"],
        "idea": step["idea"],
        "why": step["why"],
        "problem": step["problem"],
        "config": "" if config is None else KernelConfig.from_json(config).label,
        "time_us": None if timing is None else timing["median_us"],
        "predicted_us": step["predicted_us"],
        "band": stored_band_text(step.get("predicted_band")),
        "over_before": step["over_before"],
        "bytes_once": step["hbm_bytes_least"],
        "bytes_uncached": step["hbm_bytes"],
    }


def _replay(content: Mapping[str, Any]) -> View:
    strategies = {
        name: {
            "seconds": row["seconds"],
            "regret": row["regret"],
            "shapes": {label: list(values) for label, values in row["shapes"].items()},
        }
        for name, row in content["strategies"].items()
    }
    return {
        "default": content["default"],
        "measurements": list(content["measurements"]),
        "sweeps": len(content["sweeps"]),
        "strategies": strategies,
    }


def _noise(content: Mapping[str, Any]) -> View:
    measurements, configs = content["measurements"], content["configs"]
    return _origin(content) | {
        "label": AttentionShape.from_json(
            {name: value for name, value in content["shape"].items() if name != "label"}
        ).label,
        "configs": [config["label"] for config in configs],
        "finals": measurements["finals"],
        "samples": {name: measurements["samples"][name] for name in SAMPLED},
        "tie_band": content["summary"]["tie_band_used"],
    }


SAMPLED = ("at_seconds", "regime", "sm_clock_mhz", "power_w", "temperature_c")
"""What the strip of the GPU's state shows of a file of noise."""


def _origin(content: Mapping[str, Any]) -> View:
    """Return where and when it was measured."""
    device, environment = content["device"], content["environment"]
    return {
        "device": device if isinstance(device, str) else device["name"],
        "created_at": content["created_at"],
        "software": {name: environment.get(name) for name in ("triton", "torch", "driver", "power_limit_w")},
    }


VIEWS: Mapping[str, Callable[[Mapping[str, Any]], View]] = {
    "bench": _bench,
    "ladder": _ladder,
    "replay": _replay,
    "noise": _noise,
}

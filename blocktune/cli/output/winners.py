"""How a stored winner looks, in JSON and in tables."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from blocktune.cli.output.render import microseconds, millijoules
from blocktune.db.records.records import problem_json
from blocktune.kernels.values.text import counted
from blocktune.tuner.cost.bands import band_of, predicted_json, predicted_text

if TYPE_CHECKING:
    from blocktune.db.records.records import AnyBest, Best
    from blocktune.db.store import ResultStore
    from blocktune.kernels.values.config import KernelConfig
    from blocktune.runtime.autotuned.config import LaunchConfig

COLUMNS = ("", "config", "time", "energy", "predicted", "against the default")


IS_DEFAULT = "is the default"
"""What stands in place of a speed over the default where the winner is that default."""

Predictions = Mapping[Any, float | None]
"""What the model says of each tried config, in microseconds."""


def predictions(store: "ResultStore", best: "Best") -> Predictions:
    """Return the predicted times of the trials that the winner won against."""
    trials = store.trials(best.device, best.shape, environment=best.environment)
    return {trial.config: trial.predicted_us for trial in trials}


def config_json(config: "KernelConfig | LaunchConfig | None", **facts: Any) -> dict[str, Any] | None:
    """Return a config with what is known about it; None stays None."""
    return None if config is None else {"kernel": config.kernel, "config": config.to_json()} | facts


def winner_json(best: "AnyBest", predicted: "Predictions | None" = None) -> dict[str, Any]:
    """Return a winner with its origin, its rivals, and the environment that it was found in.

    Args:
        best: the winner.
        predicted: what the model says of its rivals, where that is known.
    """
    return {
        "device": best.device.to_json(),
        "shape": problem_json(best.shape),
        "best": config_json(
            best.config,
            time_us=best.time_us,
            energy_mj=best.energy_mj,
            **predicted_json(best.predicted_us, best.config.kernel, best.shape, best.device),
            origin=str(best.origin),
        ),
        "default": _rival_json(best, best.default, best.default_time_us, best.default_energy_mj, predicted),
        "paper": _rival_json(best, best.paper, best.paper_time_us, best.paper_energy_mj, predicted),
        "objective": best.objective,
        "speedup_over_default": best.speedup_json,
        "kernel_hash": best.kernel_hash,
        "environment": asdict(best.environment),
        "trials": best.trials,
        "created_at": best.created_at.isoformat(),
    }


def _rival_json(
    best: "AnyBest",
    rival: "KernelConfig | LaunchConfig | None",
    time_us: float | None,
    energy_mj: float | None,
    predicted: "Predictions | None",
) -> dict[str, Any] | None:
    if rival is None:
        return None
    prediction = predicted_json((predicted or {}).get(rival), rival.kernel, best.shape, best.device)
    return config_json(rival, time_us=time_us, energy_mj=energy_mj, **prediction)


def winner_rows(best: "AnyBest", predicted: Predictions) -> list[tuple[str, ...]]:
    """Return the winner, the kernel's default and FA's heuristic, one row each, in the columns `COLUMNS`."""
    default_us = checked_us(best, best.default, predicted)
    rivals = (
        ("default", best.default, best.default_time_us, best.default_energy_mj),
        ("FA heuristic", best.paper, best.paper_time_us, best.paper_energy_mj),
    )
    against = IS_DEFAULT if is_default(best) else _against_default(best, default_us, predicted)
    expected = _predicted(best, best.config, best.predicted_us)
    rows = [_row("winner", best.config, best.time_us, best.energy_mj, expected, against)]
    for name, config, time_us, energy_mj in rivals:
        if config is not None and not (name == "default" and is_default(best)):
            expected_us = checked_us(best, config, predicted)
            ratio = _ratio(best.default_time_us, time_us) if time_us else _ratio(default_us, expected_us, "predicted ")
            rows.append(_row(name, config, time_us, energy_mj, _predicted(best, config, predicted.get(config)), ratio))
    return rows


def _row(
    name: str,
    config: "KernelConfig | LaunchConfig",
    time_us: float | None,
    energy_mj: float | None,
    predicted: str,
    ratio: str,
) -> tuple[str, ...]:
    return name, config.label, microseconds(time_us), millijoules(energy_mj), predicted, ratio


def _predicted(best: "AnyBest", config: "KernelConfig | LaunchConfig", predicted_us: float | None) -> str:
    return predicted_text(predicted_us, config.kernel, best.shape, best.device)


def checked_us(best: "AnyBest", config: "KernelConfig | LaunchConfig | None", predicted: Predictions) -> float | None:
    """Return the predicted time of a config, which a ratio may be made of; None where no error band is known."""
    if config is None or band_of(config.kernel, best.shape, best.device) is None:
        return None
    return best.predicted_us if config == best.config else predicted.get(config)


def _against_default(best: "AnyBest", default_us: float | None, predicted: Predictions) -> str:
    if best.time_us is not None:
        return speedup(best)
    return _ratio(default_us, checked_us(best, best.config, predicted), "predicted ")


def speedup(best: "AnyBest") -> str:
    """Return how much faster the winner is than the default, with its spread; a dash where nothing was measured."""
    if is_default(best):
        return IS_DEFAULT
    if best.speedup_over_default is None:
        return "-"
    return speedup_text(best.speedup_over_default, best.speedup_low, best.speedup_high)


def speedup_text(median: float, low: float | None, high: float | None) -> str:
    """Return a ratio for people, with its spread where that is known."""
    return f"{median:.3f}x" if low is None or high is None else f"{median:.3f}x ({low:.3f} to {high:.3f})"


def is_default(best: "AnyBest") -> bool:
    """Return whether the winner is what a call gets without tuning."""
    return bool(best.config == best.default)


def _ratio(default_us: float | None, time_us: float | None, word: str = "") -> str:
    return "-" if not default_us or not time_us else f"{word}{default_us / time_us:.3f}x"


def origin_text(best: "AnyBest") -> str:
    """Return the origin, with the regime of what was measured, and by what it was chosen if not by time."""
    if best.time_us is None:
        return str(best.origin)
    chosen = "" if best.objective == "time" else f", chosen by {best.objective}"
    return f"{best.origin}, {best.environment.regime}{chosen}"


def provenance(best: "AnyBest") -> str:
    """Return where and when the winner was found, in one line."""
    environment = best.environment
    versions = f"triton {environment.triton}, ptxas {environment.ptxas}, torch {environment.torch}"
    driver = f", driver {environment.driver}" if environment.driver else ""
    return (
        f"{best.device.name}, {best.created_at:%Y-%m-%d %H:%M} UTC, {counted(best.trials, 'trial')}, {versions}{driver}"
    )

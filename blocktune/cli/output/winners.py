"""How a stored winner looks, in JSON and in tables."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from blocktune.cli.output.render import microseconds, millijoules
from blocktune.db.records.records import problem_json
from blocktune.kernels.values.text import counted

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
    default_us, paper_us = (
        None if rival is None or predicted is None else predicted.get(rival) for rival in (best.default, best.paper)
    )
    return {
        "device": best.device.to_json(),
        "shape": problem_json(best.shape),
        "best": config_json(
            best.config,
            time_us=best.time_us,
            energy_mj=best.energy_mj,
            predicted_us=best.predicted_us,
            origin=str(best.origin),
        ),
        "default": config_json(
            best.default, time_us=best.default_time_us, energy_mj=best.default_energy_mj, predicted_us=default_us
        ),
        "paper": config_json(
            best.paper, time_us=best.paper_time_us, energy_mj=best.paper_energy_mj, predicted_us=paper_us
        ),
        "objective": best.objective,
        "speedup_over_default": best.speedup_json,
        "kernel_hash": best.kernel_hash,
        "environment": asdict(best.environment),
        "trials": best.trials,
        "created_at": best.created_at.isoformat(),
    }


def winner_rows(best: "AnyBest", predicted: Predictions) -> list[tuple[str, ...]]:
    """Return the winner, the kernel's default and FA's heuristic, one row each, in the columns `COLUMNS`."""
    default_us = None if best.default is None else predicted.get(best.default)
    rivals = (
        ("default", best.default, best.default_time_us, best.default_energy_mj),
        ("FA heuristic", best.paper, best.paper_time_us, best.paper_energy_mj),
    )
    against = IS_DEFAULT if is_default(best) else _against_default(best, default_us)
    rows = [_row("winner", best.config, best.time_us, best.energy_mj, best.predicted_us, against)]
    for name, config, time_us, energy_mj in rivals:
        if config is not None and not (name == "default" and is_default(best)):
            predicted_us = predicted.get(config)
            ratio = _ratio(best.default_time_us, time_us) if time_us else _ratio(default_us, predicted_us, "predicted ")
            rows.append(_row(name, config, time_us, energy_mj, predicted_us, ratio))
    return rows


def _row(
    name: str,
    config: "KernelConfig | LaunchConfig",
    time_us: float | None,
    energy_mj: float | None,
    predicted_us: float | None,
    ratio: str,
) -> tuple[str, ...]:
    return name, config.label, microseconds(time_us), millijoules(energy_mj), microseconds(predicted_us), ratio


def _against_default(best: "AnyBest", default_us: float | None) -> str:
    return speedup(best) if best.time_us is not None else _ratio(default_us, best.predicted_us, "predicted ")


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

"""What the database holds of autotuned kernels, as rows and as JSON."""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.output.render import microseconds, note
from blocktune.kernels.values.errors import NoFeasibleConfigError

if TYPE_CHECKING:
    from blocktune.db.records.records import KernelBest, KernelTrial
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.runtime.autotuned.launches import Launches

KernelName = Annotated[
    str | None,
    typer.Argument(metavar="MODULE:KERNEL", help="An autotuned kernel instead of a shape.", show_default=False),
]

WINNERS = ("kernel", "key", "config", "time", "against the first", "configs")
LAUNCHES = ("hits", "misses", "seconds")
TRIALS = ("config", "outcome", "time", "remark")


def stored_kernels(
    db: str | None, device: "DeviceSpec", name: str | None = None, *, with_trials: bool = False
) -> "list[tuple[KernelBest, list[KernelTrial]]]":
    """Return the winners of kernels with this name, each with its trials, the fastest first, where they are wanted."""
    from blocktune.db.store import ResultStore
    from blocktune.db.tables.location import StoreTarget
    from blocktune.runtime.autotuned.config import CONFIGS, KernelProblem

    target = StoreTarget.of(db)
    if target.is_missing:
        note(f"There is no database at {target.label} yet; the first autotuned kernel makes it.")
        return []
    with ResultStore.open_to_read(db) as store:
        bests = [best for best in store.kernel_bests(device) if fnmatch.fnmatchcase(best.config.kernel, name or "*")]
        if not with_trials:
            return [(best, []) for best in bests]
        found = []
        for best in bests:
            problem = KernelProblem(best.shape.kernel, best.shape.problem.without(CONFIGS))
            trials = store.trials(device, problem, environment=best.environment, kernel_hash=best.kernel_hash)
            found.append((best, sorted(trials, key=lambda trial: trial.time_us or float("inf"))))
        return found


def require_kernels(
    db: str | None, device: "DeviceSpec", name: str, *, with_trials: bool = False
) -> "list[tuple[KernelBest, list[KernelTrial]]]":
    """Return the winners of kernels with this name.

    Raises:
        NoFeasibleConfigError: there are none on this device.
    """
    found = stored_kernels(db, device, name, with_trials=with_trials)
    if not found:
        raise NoFeasibleConfigError(
            f"No kernel {name} was tuned on {device.name}. Launch it under `blocktune.install()`, or run "
            f"`tune run {name} --args MODULE:FUNCTION`; `tune kernels` lists what is known."
        )
    return found


def launches_of(bests: "Iterable[KernelBest]") -> "list[Launches]":
    """Return what all processes launched with each winner's kind of call, whatever list its configs are from.

    Raises:
        StoreError: the file of the counts cannot be read.
    """
    from blocktune.runtime.autotuned.config import CONFIGS
    from blocktune.runtime.autotuned.launches import Kind, Launches, launches_path, read_launches

    path = launches_path()
    counted = {} if path is None else read_launches(path)
    kinds = (Kind(best.device.key, best.shape.kernel, best.shape.problem.without(CONFIGS)) for best in bests)
    return [counted.get(kind, Launches()) for kind in kinds]


def winner_row(best: "KernelBest") -> tuple[str, ...]:
    """Return the row of a winner, in the columns `WINNERS`."""
    return (
        best.config.kernel,
        best.shape.label,
        parameters(best.config.label),
        microseconds(best.time_us),
        "-" if best.speedup_over_default is None else f"{best.speedup_over_default:.3f}",
        str(best.trials),
    )


def launches_row(launches: "Launches") -> tuple[str, ...]:
    """Return the cells of a winner's launches, in the columns `LAUNCHES`."""
    return f"{launches.hits:,}", f"{launches.misses:,}", f"{launches.seconds:.1f}"


def trial_row(trial: "KernelTrial") -> tuple[str, ...]:
    """Return the row of a trial, in the columns `TRIALS`."""
    return parameters(trial.config.label), str(trial.outcome), microseconds(trial.time_us), trial.error


def parameters(label: str) -> str:
    """Return the label of a config without the kernel's name."""
    return label.partition(" ")[2]


def winner_json(best: "KernelBest", trials: "list[KernelTrial]") -> Mapping[str, Any]:
    """Return a winner and its trials as plain values."""
    return {
        "kernel": best.config.kernel,
        "source_hash": best.kernel_hash,
        "key": dict(best.shape.problem.arguments),
        "config": best.config.parameters,
        "time_us": best.time_us,
        "default": None if best.default is None else best.default.parameters,
        "default_time_us": best.default_time_us,
        "configs": best.trials,
        "environment": best.environment.to_json(),
        "created_at": best.created_at.isoformat(),
        "trials": [
            {
                "config": trial.config.parameters,
                "outcome": str(trial.outcome),
                "time_us": trial.time_us,
                "remark": trial.error,
            }
            for trial in trials
        ],
    }

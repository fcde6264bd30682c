"""Autotuned kernels in the database: their winners, and their trials as a table."""

import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.output.render import microseconds, print_table
from blocktune.cli.shared.stores import existing_store
from blocktune.kernels.values.errors import NothingMeasuredError

if TYPE_CHECKING:
    from blocktune.db.records.records import KernelBest, KernelTrial
    from blocktune.db.store import ResultStore
    from blocktune.kernels.hardware.device import DeviceSpec

KernelName = Annotated[
    str | None,
    typer.Argument(metavar="MODULE:KERNEL", help="An autotuned kernel instead of a shape.", show_default=False),
]


def stored_kernels(
    db: str | None, device: "DeviceSpec", name: str | None = None, *, with_trials: bool = False
) -> "list[tuple[KernelBest, list[KernelTrial]]]":
    """Return the winners of kernels with this name, each with its trials, the fastest first, where they are wanted."""
    with existing_store(db) as store:
        known = store.kernel_bests(device) if store else []
        bests = [best for best in known if fnmatch.fnmatchcase(best.config.kernel, name or "*")]
        return [(best, trials_of(store, best) if store and with_trials else []) for best in bests]


def trials_of(store: "ResultStore", best: "KernelBest") -> "list[KernelTrial]":
    """Return the trials of a winner's calls with its source and software, the fastest first."""
    found = store.trials(
        best.device, best.shape.of_any_list, environment=best.environment, kernel_hash=best.kernel_hash
    )
    return sorted(found, key=lambda trial: trial.time_us or float("inf"))


def require_kernels(
    db: str | None, device: "DeviceSpec", name: str, *, with_trials: bool = False
) -> "list[tuple[KernelBest, list[KernelTrial]]]":
    """Return the winners of kernels with this name.

    Raises:
        NothingMeasuredError: there are none on this device.
    """
    found = stored_kernels(db, device, name, with_trials=with_trials)
    if not found:
        raise NothingMeasuredError(
            f"No kernel {name} was tuned on {device.name}. Launch it under `blocktune.install()`, or run "
            f"`tune run {name} --args MODULE:FUNCTION`; `tune kernels` lists what is known."
        )
    return found


def print_trials(trials: "Sequence[KernelTrial]") -> None:
    """Show trials as a table."""
    rows = [(trial.config.label, str(trial.outcome), microseconds(trial.time_us), trial.error) for trial in trials]
    print_table(("config", "outcome", "time", "remark"), rows, optional=("remark",))


def trials_json(trials: "Sequence[KernelTrial]") -> dict[str, Any]:
    """Return trials as plain values, under a name of their own."""
    tried = [
        {
            "config": trial.config.to_json(),
            "outcome": str(trial.outcome),
            "time_us": trial.time_us,
            "remark": trial.error,
        }
        for trial in trials
    ]
    return {"tried": tried}

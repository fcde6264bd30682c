"""`tune kernels`: what the database holds of autotuned kernels, and their winners as a frozen file."""

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.shared.options import AsJson, Database, DeviceName
from blocktune.cli.shared.render import microseconds, note, print_json, print_table
from blocktune.kernels.values.errors import NoFeasibleConfigError, UsageError
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from blocktune.db.records.user_records import UserBest, UserTrial
    from blocktune.kernels.hardware.device import DeviceSpec

_WINNERS = ("kernel", "key", "config", "time", "against the first", "configs")
_TRIALS = ("config", "outcome", "time", "remark")


def kernels(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Kernels by `module:function`, wildcards allowed; shows every trial."),
    ] = None,
    device: DeviceName = None,
    freeze: Annotated[
        Path | None,
        typer.Option("--freeze", metavar="FILE", help="Write the winners to a file that a job starts with."),
    ] = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """List the winners of kernels under `blocktune.autotune` or `blocktune.install`.

    A frozen file is read by BLOCKTUNE_FROZEN_KERNELS, or by `install(frozen=...)`; equal winners give equal bytes.

    \b
    tune kernels
    tune kernels 'fla.*:*cumsum*'
    tune kernels --device h200 --freeze kernels.json
    """
    spec = choose_device(device)
    found = _winners(db, spec, name, with_trials=name is not None)
    if freeze is not None:
        _freeze(freeze, spec, [best for best, _ in found], as_json=as_json)
    elif as_json:
        print_json({"device": spec.name, "kernels": [_winner_json(best, trials) for best, trials in found]})
    elif name is None:
        print_table(_WINNERS, [_winner_row(best) for best, _ in found])
    else:
        for best, trials in found:
            note(f"{best.config.kernel} {best.problem.label}, source {best.source_hash}")
            print_table(_TRIALS, [_trial_row(trial) for trial in trials], optional=("remark",))


def _winners(
    db: str | None, device: "DeviceSpec", name: str | None, *, with_trials: bool
) -> "list[tuple[UserBest, list[UserTrial]]]":
    """Return the winners of kernels with this name, each with its trials, the fastest first, where they are wanted."""
    from blocktune.db.tables.location import StoreTarget
    from blocktune.db.user_store import UserKernelStore
    from blocktune.kernels.tuned.config import CONFIGS

    target = StoreTarget.of(db)
    if target.is_missing:
        note(f"There is no database at {target.label} yet; the first autotuned kernel makes it.")
        return []
    with UserKernelStore.open_to_read(db) as store:
        bests = [best for best in store.bests(device) if fnmatch.fnmatchcase(best.config.kernel, name or "*")]
        if not with_trials:
            return [(best, []) for best in bests]
        return [
            (
                best,
                sorted(
                    store.trials(
                        device,
                        best.config.kernel,
                        best.source_hash,
                        best.problem.without(CONFIGS),
                        best.environment,
                    ),
                    key=lambda trial: trial.time_us or float("inf"),
                ),
            )
            for best in bests
        ]


def _freeze(path: Path, device: "DeviceSpec", bests: "list[UserBest]", *, as_json: bool) -> None:
    """Write winners to a frozen file.

    Raises:
        NoFeasibleConfigError: there are none.
        UsageError: the place cannot be written.
    """
    from blocktune.db.exchange.document import save_text
    from blocktune.kernels.stored.json_pieces import canonical_text
    from blocktune.kernels.tuned.frozen import frozen_document, frozen_row

    if not bests:
        raise NoFeasibleConfigError(
            f"Freezing needs winners of autotuned kernels on {device.name}, but there is none. Run the program that "
            "launches them; --db or BLOCKTUNE_DB names another database."
        )
    rows = [frozen_row(best.config.kernel, best.source_hash, best.problem, best.config, best.time_us) for best in bests]
    try:
        save_text(canonical_text(frozen_document(device.key, rows)) + "\n", path)
    except OSError as error:
        raise UsageError(
            f"Freezing needs a place that can be written, but {path} cannot be: {error.strerror}."
        ) from error
    if as_json:
        print_json({"file": str(path), "kernels": len(rows)})
    else:
        note(f"froze {len(rows)} winners of {device.name} in {path}")


def _winner_row(best: "UserBest") -> tuple[str, ...]:
    speedup = "-" if best.speedup_over_default is None else f"{best.speedup_over_default:.3f}"
    _, _, config = best.config.label.partition(" ")
    return (best.config.kernel, best.problem.label, config, microseconds(best.time_us), speedup, str(best.trials))


def _trial_row(trial: "UserTrial") -> tuple[str, ...]:
    _, _, config = trial.config.label.partition(" ")
    return config, str(trial.outcome), microseconds(trial.time_us), trial.error


def _winner_json(best: "UserBest", trials: "list[UserTrial]") -> Mapping[str, Any]:
    return {
        "kernel": best.config.kernel,
        "source_hash": best.source_hash,
        "key": dict(best.problem.arguments),
        "config": best.config.parameters,
        "time_us": best.time_us,
        "default": best.default.parameters,
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

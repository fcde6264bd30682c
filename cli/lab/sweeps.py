"""`tune sweeps`: recorded sweeps of a database as compact files, one per shape, for `tune replay` and the record."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.shared.options import AsJson, Database, OnlyDevice
from blocktune.cli.shared.render import microseconds, note, print_json, print_table
from blocktune.cli.shared.stores import existing_store
from blocktune.kernels.values.errors import NoFeasibleConfigError, UsageError
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from blocktune.tuner.lab.sweep_file import Sweep


def sweeps(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write; made if it is missing.")],
    partial: Annotated[
        bool, typer.Option("--partial", help="Also shapes of which not every config was tried with all rounds.")
    ] = False,
    device: OnlyDevice = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Write every recorded sweep to a file of its own: all configs of a shape with times, samples and resources.

    \b
    tune run --exhaustive --grid "seq=512,2048 dim=64,128 causal=0,1"
    tune sweeps results/sweeps
    """
    from blocktune.tuner.lab.sweep_file import save_sweep, sweeps_of

    only = choose_device(device) if device else None
    with existing_store(db) as store:
        if store is None:
            raise NoFeasibleConfigError("There are no sweeps to write: no database. Name one by --db or BLOCKTUNE_DB.")
        found = sweeps_of(store.trials(only))
    _make(folder)
    rows: list[dict[str, Any]] = []
    for sweep in found:
        row = _row(sweep)
        if row["missing"] and not partial:
            note(f"left out: {sweep.label}, whose {row['missing']} other configs `tune run --exhaustive` would try")
            continue
        path = save_sweep(sweep, folder)
        rows.append(row | {"file": str(path), "bytes": path.stat().st_size})
    if as_json:
        print_json({"sweeps": rows})
        return
    print_table(
        ("file", "configs", "with a time", "missing", "best", "bytes"),
        [
            (row["file"], row["configs"], row["timed"], row["missing"], microseconds(row["best_us"]), row["bytes"])
            for row in rows
        ],
    )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"Sweeps need a folder, but {folder} cannot be made: {error}. Name another one.") from error


def _row(sweep: "Sweep") -> dict[str, Any]:
    from blocktune.kernels.registry import competing
    from blocktune.tuner.search.space import SearchSpace

    feasible = SearchSpace.build(sweep.shape, sweep.device.limits, competing()).feasible
    return {
        "device": sweep.device.name,
        "shape": sweep.shape.to_json() | {"label": sweep.shape.label},
        "regime": str(sweep.environment.regime),
        "configs": len(sweep.trials),
        "timed": len(sweep.timed),
        "missing": len(set(feasible) - sweep.complete),
        "best_us": min((trial.time_us or 0.0 for trial in sweep.timed.values()), default=None),
    }

"""`tune lab sweeps`: recorded sweeps of a database as compact files, one per shape; and such a file as heat maps.

`tune lab sweeps FOLDER` writes files and `tune lab sweeps show FILE` shows one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from blocktune.cli.output.render import microseconds, note, print_json, print_styled, print_table, terminal_width
from blocktune.cli.shared.options import AsJson, Database, OnlyDevice
from blocktune.cli.shared.stores import existing_store
from blocktune.kernels.values.errors import NothingMeasuredError, UsageError
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from blocktune.tuner.lab.sweep_file import Sweep


WRITE = "write"
"""The command that `tune lab sweeps FOLDER` means, which names none."""


class Sweeps(TyperGroup):
    """The commands about sweeps; without the name of one it is `write`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = not args or args[0] in {*self.commands, *ctx.help_option_names}
        parsed: list[str] = super().parse_args(ctx, args if named else [WRITE, *args])
        return parsed


app = typer.Typer(cls=Sweeps, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def group() -> None:
    """Write recorded sweeps, or show one.

    \b
    tune lab sweeps results/sweeps
    tune lab sweeps show results/sweeps/h200-b2-h32-s8192-d64-bf16.sweep.json.gz
    """


@app.command("show")
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A sweep that `tune lab sweeps FOLDER` wrote.")],
    as_json: AsJson = False,
) -> None:
    """Show a recorded sweep as heat maps: TFLOP/s of every tile by kernel, warps and stages.

    \b
    tune lab sweeps show results/sweeps/h200-b2-h32-s8192-d64-bf16.sweep.json.gz
    """
    from blocktune.cli.lab.sweep_maps import sweep_json, sweep_lines
    from blocktune.tuner.lab.sweep_file import load_sweep

    sweep = load_sweep(file)
    if as_json:
        print_json(sweep_json(sweep))
        return
    print_styled(sweep_lines(sweep, terminal_width()))


@app.command(WRITE)
def sweeps(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write; made if it is missing.")],
    partial: Annotated[
        bool, typer.Option("--partial", help="Also write shapes with configs that were not tried with all rounds.")
    ] = False,
    device: OnlyDevice = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Write every recorded sweep to a file of its own: all configs of a shape with times, samples and resources.

    \b
    tune run --exhaustive --grid "seq=512,2048 dim=64,128 causal=0,1"
    tune lab sweeps results/sweeps
    """
    from blocktune.tuner.lab.sweep_file import save_sweep, sweeps_of

    only = choose_device(device) if device else None
    with existing_store(db) as store:
        if store is None:
            raise NothingMeasuredError(
                "There is no database, so there are no sweeps to write. Name one by --db or BLOCKTUNE_DB."
            )
        found = sweeps_of(store.trials(only))
    _make(folder)
    if not found:
        note("no shape was swept yet; `tune run --exhaustive` does it")
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
        raise UsageError(f"The folder {folder} cannot be made: {error.strerror}. Name another one.") from error


def _row(sweep: "Sweep") -> dict[str, Any]:
    from blocktune.kernels.registry import competing
    from blocktune.tuner.candidates.space import SearchSpace

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

"""`tune run`: search the block sizes of one shape or many, or predict them for a device that is not here."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.shared.gpu_count import gpus_for, wanted_gpus
from blocktune.cli.shared.grid import Grid, with_grid_flags
from blocktune.cli.shared.options import AsJson, Database, DeviceName
from blocktune.cli.shared.progress import shown_progress
from blocktune.cli.shared.render import INTERRUPTED, counts, note, percent, print_json, print_table
from blocktune.cli.shared.shapes_file import shapes_of_file
from blocktune.cli.shared.winners import COLUMNS, Predictions, origin_text, predictions, winner_rows
from blocktune.cli.tune.misses import missed_shapes
from blocktune.cli.tune.run_many import run_many
from blocktune.db.records.records import Regime
from blocktune.tuner.measure.device_choice import choose_device, is_present
from blocktune.tuner.measure.protocol import DEFAULT_REGIME

if TYPE_CHECKING:
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.kernels.values.shape import AttentionShape
    from blocktune.tuner.search.report import TuningReport


@with_grid_flags
def run(
    grid: Grid,
    trials: Annotated[int | None, typer.Option("--trials", help="Configs to try at most.")] = None,
    time_budget: Annotated[float | None, typer.Option("--time-budget", help="Seconds to search at most.")] = None,
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", help="Search this kernel only; may be repeated.")
    ] = None,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Try every config, whatever the time.")] = False,
    regime: Annotated[
        Regime | None,
        typer.Option(
            "--regime", help=f"GPU rests between rounds, or works without a break.  [default: {DEFAULT_REGIME}]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the sampler and the test data.")] = 0,
    from_misses: Annotated[
        bool,
        typer.Option("--from-misses", help="The shapes that the dispatcher had no measurement of, frequent first."),
    ] = False,
    shapes_file: Annotated[
        Path | None, typer.Option("--shapes", help="Many shapes, as tables of a TOML file: seq = 8192, dim = 64, …")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", metavar="N|all", help="GPUs of one kind that share many shapes.  [default: all]"),
    ] = None,
    device: DeviceName = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest config for a shape on this GPU.

    For a device that is not here it is predicted, from compiled code and a cost model.
    Every trial is stored when it ends: Ctrl-C keeps what was found, and the same command goes on from there.

    \b
    tune run --seq 8192 --dim 64
    tune run --seq 4096 --dim 128 --causal --heads 32 --kv-heads 8 --time-budget 60
    tune run --seq 8192 --dim 64 --device a100 --json
    tune run --grid "seq=512,1024 dim=64,128 causal=0,1" --time-budget 60
    tune run --shapes shapes.toml --gpus 2
    tune run --seq 8192 --dim 128 --direction backward
    tune run --seq 8192 --dim 128 --causal --features "window=1023:0 softcap"
    tune run --from-misses --time-budget 60
    """
    # Before heavy imports, so that wrong use fails at once.
    shapes, spec, wanted = grid.shapes(), choose_device(device), wanted_gpus(gpus)
    if shapes_file is not None:
        shapes = shapes_of_file(shapes_file)
    elif from_misses:
        shapes = missed_shapes(spec, db)
    devices = gpus_for(spec, wanted, len(shapes))

    from blocktune.kernels.registry import get_kernel
    from blocktune.tuner.search.report import Budget

    search: dict[str, Any] = {
        "device": spec,
        "budget": Budget(trials=trials, seconds=time_budget),
        "kernels": [get_kernel(name) for name in kernel] if kernel else None,
        "exhaustive": exhaustive,
        "regime": regime,
        "seed": seed,
    }
    _announce(spec)
    if not grid.many:
        assumed = grid.flags[0].assumed()
        if assumed:
            note(assumed)
        interrupted = _run_one(shapes[0], db, as_json, search)
    else:
        interrupted = run_many(shapes, db, as_json, search, devices)
    if interrupted:
        note("interrupted; all trials are kept, and the same command goes on from here")
        raise typer.Exit(INTERRUPTED)


def _run_one(shape: "AttentionShape", db: str | None, as_json: bool, search: dict[str, Any]) -> bool:
    """Tune a shape and show all about it; returns whether the user cut it short."""
    from blocktune.db.store import ResultStore
    from blocktune.tuner.search.tune import tune

    with ResultStore.open(db) as store, shown_progress() as show:
        report = tune(shape, store=store, on_progress=show, **search)
        predicted, place = predictions(store, report.best), store.label
    if as_json:
        print_json(report.to_json())
    else:
        _show(report, predicted, place)
    return report.interrupted


def _announce(spec: "DeviceSpec") -> None:
    """What will be done, first of all."""
    from blocktune.kernels.hardware.device import present_devices

    if is_present(spec):
        note(f"measuring on {spec.name}")
        return
    missing = spec.name if present_devices() else "GPU"
    where = f"{spec.name} (compute capability {spec.limits.name})"
    note(f"no {missing} in this machine: compiling for {where} and predicting, not measuring")


def _show(report: "TuningReport", predicted: Predictions, place: str) -> None:
    best = report.best
    title = f"{best.shape.label} on {best.device.name}, {origin_text(best)}"
    print_table(COLUMNS, winner_rows(best, predicted), title=title)
    lines = ["", report.reason]
    if report.occupancy is not None:
        result = report.occupancy
        limiters = " and ".join(limiter.replace("_", " ") for limiter in result.limiters)
        lines.append(
            f"occupancy of the winner: {result.blocks_per_sm} blocks/SM, {result.active_warps} warps "
            f"({percent(result.fraction)}), limited by {limiters}"
        )
    lines.append(
        f"{report.feasible} configs can run; tried: {counts(report.outcomes)} ({report.resumed} of earlier runs)"
    )
    lines += [f"{count} dropped: {rule}" for rule, count in report.dropped.items()]
    lines += [f"{name} takes no part: {reason}" for name, reason in report.unsupported.items()]
    lines += report.notes
    kept = "stored in" if report.stored else "not stored, since a better one is in"
    lines.append(f"{kept} {place} after {report.seconds:.1f} s")
    typer.echo("\n".join(lines))

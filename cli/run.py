"""`tune run`: search the block sizes of one shape, or predict them for a device that is not here."""

from typing import TYPE_CHECKING, Annotated

import typer

from blocktune.cli.options import AsJson, Database, DeviceName, ShapeFlags, device_asked_for, with_shape_flags
from blocktune.cli.progress import shown_progress
from blocktune.cli.render import INTERRUPTED, counts, note, percent, print_json, print_table
from blocktune.cli.winners import COLUMNS, Predictions, predictions, winner_rows

if TYPE_CHECKING:
    from blocktune.kernels.device import DeviceSpec
    from blocktune.tuner.report import TuningReport


@with_shape_flags
def run(
    flags: ShapeFlags,
    trials: Annotated[int | None, typer.Option("--trials", help="Configs to try at most.")] = None,
    time_budget: Annotated[float | None, typer.Option("--time-budget", help="Seconds to search at most.")] = None,
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", help="Search this kernel only; may be repeated.")
    ] = None,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Try every config, whatever the time.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of the sampler and the test data.")] = 0,
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
    """
    shape, spec = flags.shape(), device_asked_for(device)  # before heavy imports, so that wrong use fails at once

    from blocktune.db.store import ResultStore
    from blocktune.kernels.registry import get_kernel
    from blocktune.tuner.report import Budget
    from blocktune.tuner.run import tune

    kernels = [get_kernel(name) for name in kernel] if kernel else None
    budget = Budget(trials=trials, seconds=time_budget)
    _announce(spec)
    if flags.assumed():
        note(flags.assumed())
    with ResultStore.open(db) as store, shown_progress() as show:
        report = tune(
            shape,
            device=spec,
            store=store,
            budget=budget,
            kernels=kernels,
            exhaustive=exhaustive,
            seed=seed,
            on_progress=show,
        )
        predicted, place = predictions(store, report.best), store.label
    if as_json:
        print_json(report.to_json())
    else:
        _show(report, predicted, place)
    if report.interrupted:
        note("interrupted; all trials are kept, and the same command goes on from here")
        raise typer.Exit(INTERRUPTED)


def _announce(spec: "DeviceSpec") -> None:
    """What will be done, first of all."""
    from blocktune.kernels.device import present_devices
    from blocktune.tuner.run import is_present

    if is_present(spec):
        note(f"measuring on {spec.name}")
        return
    missing = spec.name if present_devices() else "GPU"
    where = f"{spec.name} (compute capability {spec.limits.name})"
    note(f"no {missing} in this machine: compiling for {where} and predicting, not measuring")


def _show(report: "TuningReport", predicted: Predictions, place: str) -> None:
    best = report.best
    title = f"{best.shape.label} on {best.device.name}, {best.origin}"
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

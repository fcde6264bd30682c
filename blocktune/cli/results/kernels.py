"""`tune kernels`: what the database holds of autotuned kernels, and their winners as a frozen file."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktune.cli.output.render import microseconds, note, print_json, print_table
from blocktune.cli.output.winners import speedup, winner_json
from blocktune.cli.shared.kernels import print_trials, stored_kernels, trials_json
from blocktune.cli.shared.options import AsJson, Database, DeviceName
from blocktune.kernels.values.errors import NothingMeasuredError, UsageError
from blocktune.kernels.values.text import counted
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from blocktune.db.records.records import KernelBest
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.runtime.autotuned.launches import Launches


def kernels(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Kernels by `module:function`, with wildcards; shows every trial."),
    ] = None,
    device: DeviceName = None,
    freeze: Annotated[
        Path | None,
        typer.Option("--freeze", metavar="FILE", help="Write the winners to a file that a job starts with."),
    ] = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """List the winners of autotuned kernels, with their launches.

    Those are kernels under `blocktune.autotune` or `blocktune.install`. Hits are launches, in all processes that have
    ended, for which the config was known; misses had to wait for it to be measured, for this many seconds.

    A frozen file is read by BLOCKTUNE_FROZEN_KERNELS, by `install(frozen=...)` or by BLOCKTUNE_DB. `tune freeze` writes
    the winners of all kernels to one such file, and can sign it.

    \b
    tune kernels
    tune kernels 'fla.*:*cumsum*'
    tune kernels --device h200 --freeze kernels.json
    """
    spec = choose_device(device)
    found = stored_kernels(db, spec, name, with_trials=name is not None)
    bests = [best for best, _ in found]
    if name is not None and not found:
        raise NothingMeasuredError(f"No kernel {name} was tuned on {spec.name}. `tune kernels` lists what is known.")
    if freeze is not None:
        _freeze(freeze, spec, bests, as_json=as_json)
    elif as_json:
        rows = [
            winner_json(best) | trials_json(trials) | {"launches": asdict(launches)}
            for (best, trials), launches in zip(found, _launches(bests), strict=True)
        ]
        print_json({"device": spec.name, "kernels": rows})
    elif not found:
        note(f"no autotuned kernel was tuned on {spec.name} yet: run your program with blocktune.install()")
    elif name is None:
        print_table(_COLUMNS, [_row(*pair) for pair in zip(bests, _launches(bests), strict=True)])
    else:
        for best, trials in found:
            note(f"{best.shape.full_label}, source {best.kernel_hash}")
            print_trials(trials)


_COLUMNS = ("kernel and key", "config", "time", "against the default", "trials", "hits", "misses", "seconds")


def _row(best: "KernelBest", launches: "Launches") -> tuple[str, ...]:
    counts = (f"{launches.hits:,}", f"{launches.misses:,}", f"{launches.seconds:.1f}")
    return (
        best.shape.full_label, best.config.label, microseconds(best.time_us), speedup(best), str(best.trials), *counts
    )  # fmt: skip


def _launches(bests: "list[KernelBest]") -> "list[Launches]":
    """Return what all processes launched with each winner's kind of call, whatever list its configs are from.

    Raises:
        StoreError: the file of the counts cannot be read.
    """
    from blocktune.runtime.autotuned.config import BYTES, CONFIGS, PROGRAMS
    from blocktune.runtime.autotuned.launches import Kind, Launches, launches_path, read_launches

    path = launches_path()
    counted = {} if path is None else read_launches(path)
    problems = (best.shape.problem.without(CONFIGS, PROGRAMS, BYTES) for best in bests)
    kinds = (Kind(best.device.key, best.shape.kernel, problem) for best, problem in zip(bests, problems, strict=True))
    return [counted.get(kind, Launches()) for kind in kinds]


def _freeze(path: Path, device: "DeviceSpec", bests: "list[KernelBest]", *, as_json: bool) -> None:
    """Write winners to a frozen file.

    Raises:
        NothingMeasuredError: there are none.
        UsageError: the place cannot be written.
    """
    from blocktune.db.exchange.document import frozen_document, save_text
    from blocktune.kernels.files.json_pieces import canonical_text

    if not bests:
        raise NothingMeasuredError(
            f"Freezing needs winners of autotuned kernels on {device.name}, but there is none. Run the program that "
            "launches them; --db or BLOCKTUNE_DB names another database."
        )
    try:
        save_text(canonical_text(frozen_document(device, bests)) + "\n", path)
    except OSError as error:
        raise UsageError(
            f"Freezing needs a place that can be written, but {path} cannot be: {error.strerror}."
        ) from error
    if as_json:
        print_json({"file": str(path), "kernels": len(bests)})
    else:
        note(f"froze {counted(len(bests), 'winner')} of {device.name} in {path}")

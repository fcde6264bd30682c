"""`tune kernels`: what the database holds of autotuned kernels, and their winners as a frozen file."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktune.cli.autotuned.rows import (
    LAUNCHES,
    TRIALS,
    WINNERS,
    launches_of,
    launches_row,
    stored_kernels,
    trial_row,
    winner_json,
    winner_row,
)
from blocktune.cli.output.render import note, print_json, print_table
from blocktune.cli.shared.options import AsJson, Database, DeviceName
from blocktune.kernels.values.errors import NoFeasibleConfigError, UsageError
from blocktune.kernels.values.text import counted
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from blocktune.db.records.records import KernelBest
    from blocktune.kernels.hardware.device import DeviceSpec


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
    if freeze is not None:
        _freeze(freeze, spec, bests, as_json=as_json)
    elif as_json:
        launched = ({"launches": asdict(launches)} for launches in launches_of(bests))
        rows = [{**winner_json(*each), **launches} for each, launches in zip(found, launched, strict=True)]
        print_json({"device": spec.name, "kernels": rows})
    elif not found:
        which = f"kernel {name}" if name else "autotuned kernel"
        note(f"no {which} was tuned on {spec.name}; a program that launches some under `autotune` or `install` does it")
    elif name is None:
        pairs = zip(bests, launches_of(bests), strict=True)
        print_table((*WINNERS, *LAUNCHES), [(*winner_row(best), *launches_row(each)) for best, each in pairs])
    else:
        for best, trials in found:
            note(f"{best.config.kernel} {best.shape.label}, source {best.kernel_hash}")
            print_table(TRIALS, [trial_row(trial) for trial in trials], optional=("remark",))


def _freeze(path: Path, device: "DeviceSpec", bests: "list[KernelBest]", *, as_json: bool) -> None:
    """Write winners to a frozen file.

    Raises:
        NoFeasibleConfigError: there are none.
        UsageError: the place cannot be written.
    """
    from blocktune.db.exchange.document import frozen_document, save_text
    from blocktune.kernels.files.json_pieces import canonical_text

    if not bests:
        raise NoFeasibleConfigError(
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

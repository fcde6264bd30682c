"""`tune list`, `tune export` and `tune import`: what the database holds."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktune.cli.results.foreign_exports import write_configs
from blocktune.cli.shared.options import AsJson, Database, DeviceName
from blocktune.cli.shared.render import microseconds, note, print_json, print_table
from blocktune.cli.shared.winners import speedup, winner_json
from blocktune.db.exchange.foreign_formats import ExportFormat
from blocktune.kernels.values.errors import StoreError, UsageError
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from blocktune.db.exchange.merging import ImportCounts
    from blocktune.db.store import ResultStore

OutputFile = Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; `-` is stdout.", allow_dash=True)]
InputFile = Annotated[Path, typer.Argument(metavar="FILE", help="An export to read.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Believe what was measured there; else it is borrowed until `tune verify`.")
]


@contextmanager
def existing_store(db: str | None) -> Iterator["ResultStore | None"]:
    """The store, upgraded where it is older; None, with a message, where there is none: reading creates nothing."""
    from blocktune.db.store import ResultStore
    from blocktune.db.tables.location import StoreTarget

    target = StoreTarget.of(db)
    if target.path is not None and not target.path.exists():
        note(f"There is no database at {target.label} yet; `tune run` makes it.")
        yield None
        return
    with ResultStore.open(db) as store:
        yield store


def list_bests(device: DeviceName = None, db: Database = None, as_json: AsJson = False) -> None:
    """List the stored winners.

    \b
    tune list
    tune list --device h200 --json
    """
    only = choose_device(device) if device else None
    with existing_store(db) as store:
        bests = store.bests(only) if store else []
    if as_json:
        print_json({"bests": [winner_json(best) for best in bests]})
        return
    rows = [
        (best.device.name, best.shape.label, best.config.label, best.origin, microseconds(best.time_us), speedup(best))
        for best in bests
    ]
    print_table(("device", "shape", "config", "origin", "time", "against the default"), rows)


def export(
    file: OutputFile,
    device: DeviceName = None,
    trials: Annotated[bool, typer.Option("--trials", help="Every trial too, not only the winners.")] = False,
    format_: Annotated[
        ExportFormat, typer.Option("--format", help="Ours, or one of others; vllm writes files into a folder.")
    ] = ExportFormat.JSON,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Write the results of one device to a JSON file, or its winners in the format of others.

    \b
    tune export h200.json --device h200
    tune export - --trials
    tune export h200_configs.py --format triton
    """
    from blocktune.db.exchange.document import save_document

    only = choose_device(device) if device else None
    with existing_store(db) as store:
        if store is None:
            raise StoreError("An export needs a database, but there is none. Name another one by --db or BLOCKTUNE_DB.")
        document = store.export_json(only, trials=trials or format_ is ExportFormat.FLEX)
    if format_ is not ExportFormat.JSON:
        write_configs(document, format_, file, db=db, as_json=as_json)
        return
    if str(file) == "-":
        typer.echo(json.dumps(document, indent=1, sort_keys=True, allow_nan=False))
        return
    try:
        save_document(document, file)
    except OSError as error:
        raise UsageError(
            f"The export needs a file that can be written, but {file} cannot: {error.strerror}."
        ) from error
    counts = {"file": str(file), "bests": len(document["bests"]), "trials": len(document.get("trials") or ())}
    if as_json:
        print_json(counts)
    else:
        note(f"wrote {counts['bests']} winners and {counts['trials']} trials to {file}")


def import_(file: InputFile, trust: Trust = False, db: Database = None, as_json: AsJson = False) -> None:
    """Take the results of an export into the database.

    All of them or, when anything is wrong, none. What the database holds and ranks higher stays. Winners that were
    measured elsewhere count as borrowed until `tune verify` has measured them here, unless you trust the file.

    \b
    tune import h200.json
    tune import my-own-h200.json --trust
    """
    from blocktune.db.exchange.document import load_document
    from blocktune.db.store import ResultStore

    try:
        document = load_document(file)
    except OSError as error:
        raise UsageError(f"An import needs a file that can be read, but {file} cannot: {error.strerror}.") from error
    with ResultStore.open(db) as store:
        counts = store.import_json(document, trust=trust)
    show_imported(counts, as_json)


def show_imported(counts: "ImportCounts", as_json: bool) -> None:
    """What an import or a merge did."""
    if as_json:
        print_json(asdict(counts))
        return
    note(
        f"imported {counts.bests} winners and {counts.trials} trials; "
        f"kept the database's own {counts.bests_kept} winners and {counts.trials_kept} trials"
    )

"""`tune list`, `tune export` and `tune import`: what the database holds."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.output.render import microseconds, note, print_content, print_json, print_table
from blocktune.cli.output.winners import speedup, winner_json
from blocktune.cli.results.foreign_exports import write_configs, write_trials
from blocktune.cli.results.studies import read_studies
from blocktune.cli.shared.lookup import shipped_winners
from blocktune.cli.shared.options import AsJson, Database, OneDevice, OnlyDevice
from blocktune.cli.shared.stores import existing_store
from blocktune.db.exchange.foreign_formats import OF_TRIALS, ExportFormat
from blocktune.db.records.records import problem_label
from blocktune.kernels.values.errors import NothingMeasuredError, UsageError
from blocktune.kernels.values.text import counted
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blocktune.db.exchange.merging import Results
    from blocktune.db.records.records import AnyBest, Best, KernelBest
    from blocktune.kernels.hardware.device import DeviceSpec

OutputFile = Annotated[
    str, typer.Argument(metavar="FILE", help="The file to write; `-` is stdout. For optuna, a file or a URL.")
]
InputFile = Annotated[str, typer.Argument(metavar="FILE", help="An export to read, or the URL of Optuna's storage.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Trust its measurements; otherwise they are borrowed until `tune verify`.")
]


def list_bests(
    device: OnlyDevice = None,
    shipped: Annotated[bool, typer.Option("--shipped", help="Show what ships with the package.")] = False,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """List the stored winners. Without any, it lists those that ship with the package. Autotuned kernels follow.

    \b
    tune list
    tune list --device h200 --json
    tune list --shipped
    """
    from blocktune.db.rivals import with_todays_default, with_todays_rivals

    only = choose_device(device) if device else None
    found, kernels = ([], []) if shipped else _stored_winners(db, only)
    source = "database" if found else "shipped"
    found = found or [best for best in shipped_winners() if only is None or best.device.key == only.key]
    if as_json:
        listed = [winner_json(with_todays_rivals(best)) | {"source": source} for best in found]
        print_json({"bests": listed, "kernels": [winner_json(best) for best in kernels]})
        return
    rows = [_row(source, best) for best in map(with_todays_default, found)]
    rows += [_row("database", best) for best in kernels]
    print_table(_COLUMNS, rows, optional=("origin", "source", "device", "against the default"))


_COLUMNS = ("source", "device", "shape", "config", "origin", "time", "against the default")


def _row(source: str, best: "AnyBest") -> tuple[str, ...]:
    time, problem = microseconds(best.time_us), problem_label(best.shape)
    return source, best.device.name, problem, best.config.label, str(best.origin), time, speedup(best)


def _stored_winners(db: str | None, only: "DeviceSpec | None") -> "tuple[list[Best], list[KernelBest]]":
    """Return the winners of attention and of autotuned kernels, on this device or on all."""
    with existing_store(db) as store:
        return (store.bests(only), store.kernel_bests(only)) if store else ([], [])


def export(
    file: OutputFile,
    device: OneDevice = None,
    trials: Annotated[bool, typer.Option("--trials", help="Also write every trial, not only the winners.")] = False,
    format_: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="json is ours. vllm, kernel-tuner and t4 write a folder; optuna writes all trials as studies, "
            "csv and parquet as tables, trace for Perfetto and Chrome.",
        ),
    ] = ExportFormat.JSON,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Write the results of one device to a JSON or other file.

    \b
    tune export h200.json --device h200
    tune export - --trials
    tune export h200_configs.py --format triton
    tune export studies.db --format optuna
    tune export trials.parquet --format parquet
    tune export caches --format kernel-tuner
    tune export search.json --format trace
    """
    from blocktune.db.exchange.document import save_document

    only = choose_device(device) if device else None
    with existing_store(db) as store:
        if store is None:
            raise NothingMeasuredError(
                "There is no database, so there is nothing to export. Name one by --db or BLOCKTUNE_DB."
            )
        if format_ in OF_TRIALS:
            write_trials(store.all_trials(only), format_, file, as_json=as_json)
            return
        document = store.export_json(only, trials=trials or format_ is ExportFormat.FLEX)
    if format_ is not ExportFormat.JSON:
        write_configs(document, format_, Path(file), as_json=as_json)
        return
    if file == "-":
        print_content(json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n")
        return
    try:
        save_document(document, file)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}. Name another file.") from error
    counts: dict[str, Any] = {
        "file": file,
        "bests": len(document["bests"]),
        "trials": len(document.get("trials") or ()),
    }
    if as_json:
        print_json(counts)
    else:
        note(f"wrote {counted(counts['bests'], 'winner')} and {counted(counts['trials'], 'trial')} to {file}")


def import_(file: InputFile, trust: Trust = False, db: Database = None, as_json: AsJson = False) -> None:
    """Add the results of an export to the database.

    If anything is wrong, nothing is added. Results in the database that rank higher stay. Winners that were measured
    elsewhere count as borrowed until `tune verify` has measured them here, unless you trust the file. Winners of
    autotuned kernels are taken only with --trust.

    \b
    tune import h200.json
    tune import my-own-h200.json --trust
    tune import sqlite:///studies.db
    """
    from blocktune.db.exchange.importing import records_in, records_in_file
    from blocktune.db.exchange.merging import Results

    records = map(records_in, read_studies(file)) if "://" in file else [records_in_file(file)]
    sources = [Results(bests=tuple(bests), trials=tuple(trials)) for bests, trials in records]
    take_in(sources, trust=trust, db=db, as_json=as_json)


def take_in(sources: "Sequence[Results]", *, trust: bool, db: str | None, as_json: bool) -> None:
    """Add results from elsewhere to the database, and say what of them it took."""
    from blocktune.db.records.records import of_attention
    from blocktune.db.store import ResultStore
    from blocktune.db.tables.backups import MERGE_SECONDS

    autotuned = sum(len(source.bests) - len(of_attention(source.bests)) for source in sources)
    if autotuned and not trust:
        note(f"left out {counted(autotuned, 'winner')} of autotuned kernels: --trust takes them")
    with ResultStore.open(db) as store:
        store.back_up(unless_within_seconds=MERGE_SECONDS)
        counts = store.merge(sources, trust=trust)
    if as_json:
        print_json(asdict(counts))
        return
    note(
        f"stored {counted(counts.bests, 'winner')} and {counted(counts.trials, 'trial')}; "
        f"left out {counted(counts.bests_kept, 'winner')} that lost to others "
        f"and {counted(counts.trials_kept, 'trial')} not newer"
    )

"""Where `tune export --format` writes what the database room makes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blocktune.cli.output.render import note, print_content, print_json
from blocktune.cli.results.studies import write_stored_studies
from blocktune.cli.results.trial_tables import write_table
from blocktune.db.exchange.document import Document, save_text
from blocktune.db.exchange.foreign_formats import ExportFormat, Files, exported_files
from blocktune.db.records.records import of_attention
from blocktune.kernels.values.errors import NothingMeasuredError, UsageError
from blocktune.kernels.values.text import counted
from blocktune.runtime.store_reader.export_file import is_launch_problem

if TYPE_CHECKING:
    from blocktune.db.records.records import AnyTrial, Trial


def write_configs(document: Document, format_: ExportFormat, place: Path, *, as_json: bool) -> None:
    """Write an export document in the format of others: into a file, or for vLLM into a folder; `-` is stdout, where
    several files are one JSON object by name.

    Raises:
        NothingMeasuredError: there is nothing to write.
        UsageError: the place cannot be written.
    """
    autotuned = sum(is_launch_problem(best["shape"]) for best in document["bests"])
    if autotuned and format_ is not ExportFormat.TRITON:
        _say_left_out(counted(autotuned, "winner"), format_)
    files = exported_files(document, format_)
    write_files(files, place, in_folder=format_ is ExportFormat.VLLM, as_json=as_json)


def write_trials(trials: "Sequence[AnyTrial]", format_: ExportFormat, place: str, *, as_json: bool) -> None:
    """Write trials in the format of others, those of autotuned kernels where it can hold them.

    Raises:
        NothingMeasuredError: there is nothing to write.
        UsageError: the place cannot be written.
    """
    if format_ is ExportFormat.OPTUNA:
        write_stored_studies(trials, place, as_json=as_json)
        return
    attention = of_attention(trials)
    if len(attention) < len(trials):
        _say_left_out(counted(len(trials) - len(attention), "trial"), format_)
    if format_ in (ExportFormat.CSV, ExportFormat.PARQUET):
        write_table(attention, format_, place, as_json=as_json)
    else:
        write_sweeps(attention, format_, Path(place), as_json=as_json)


def _say_left_out(count: str, format_: ExportFormat) -> None:
    note(f"left out {count} of autotuned kernels, which `--format {format_}` cannot hold")


def write_sweeps(trials: "Sequence[Trial]", format_: ExportFormat, place: Path, *, as_json: bool) -> None:
    """Write the newest sweep of every shape: into a folder, in a format of Kernel Tuner, or into one file as a trace;
    `-` is stdout.

    Raises:
        NothingMeasuredError: there are no trials.
        UsageError: the place cannot be written.
    """
    from blocktune.tuner.lab.sweep_file import sweeps_of
    from blocktune.tuner.report.kernel_tuner import cache_files, t4_files
    from blocktune.tuner.report.search_trace import search_trace

    sweeps = sweeps_of(trials)
    if not sweeps:
        raise NothingMeasuredError(
            f"The database has no measured trials, which `--format {format_}` writes. Run `tune run` first."
        )
    if format_ is ExportFormat.TRACE:
        write_files({"trace": search_trace(sweeps)}, place, in_folder=False, as_json=as_json)
        return
    files_of = cache_files if format_ is ExportFormat.KERNEL_TUNER else t4_files
    files: Files = {}
    for sweep in sweeps:
        files |= files_of(sweep)
    write_files(files, place, in_folder=True, as_json=as_json)


def write_files(files: Files, place: Path, *, in_folder: bool, as_json: bool) -> None:
    """Write files of JSON into a folder, or the only one to a place of its own; `-` is stdout, where those of a folder
    are one JSON object by name.

    Raises:
        UsageError: the place cannot be written.
    """
    if str(place) == "-":
        tables = {name: json.loads(text) for name, text in files.items()} if in_folder else {}
        print_content(json.dumps(tables, indent=1) + "\n" if tables else next(iter(files.values())))
        return
    try:
        written = _write(files, place, in_folder=in_folder)
    except OSError as error:
        raise UsageError(f"{place} cannot be written: {error.strerror}. Name another place.") from error
    if as_json:
        print_json({"files": written})
    else:
        note(f"wrote {place}" if len(written) == 1 else f"wrote {len(written)} files into {place}")


def _write(files: Files, place: Path, *, in_folder: bool) -> list[str]:
    """Return the paths that were written."""
    if in_folder:
        place.mkdir(parents=True, exist_ok=True)
    paths = {place / name if in_folder else place: text for name, text in files.items()}
    for path, text in paths.items():
        save_text(text, path)
    return [str(path) for path in paths]

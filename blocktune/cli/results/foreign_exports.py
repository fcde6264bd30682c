"""Where `tune export --format` writes what the database room makes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blocktune.cli.output.render import note, print_content, print_json
from blocktune.db.exchange.document import Document, save_text
from blocktune.db.exchange.foreign_formats import ExportFormat, Files, exported_files
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import NothingMeasuredError, UsageError

if TYPE_CHECKING:
    from blocktune.db.records.records import Trial


def write_configs(document: Document, format_: ExportFormat, place: Path, *, db: str | None, as_json: bool) -> None:
    """Write an export document in the format of others: into a file, or for vLLM into a folder; `-` is stdout, where
    several files are one JSON object by name. For Triton the database's winners of tuned functions are added.

    Raises:
        NothingMeasuredError: there is nothing to write.
        UsageError: the place cannot be written.
    """
    from blocktune.db.store import ResultStore

    with ResultStore.open_to_read(db) as store:
        files = exported_files(document, format_, store.kernel_bests(DeviceSpec.from_json(document["device"])))
    write_files(files, place, in_folder=format_ is ExportFormat.VLLM, as_json=as_json)


def write_sweeps(trials: "Sequence[Trial]", format_: ExportFormat, place: Path, *, as_json: bool) -> None:
    """Write the newest sweep of every shape into a folder, in a format of Kernel Tuner; `-` is stdout.

    Raises:
        NothingMeasuredError: there are no trials.
        UsageError: the place cannot be written.
    """
    from blocktune.tuner.lab.sweep_file import sweeps_of
    from blocktune.tuner.report.kernel_tuner import cache_files, t4_files

    files_of = cache_files if format_ is ExportFormat.KERNEL_TUNER else t4_files
    files: Files = {}
    for sweep in sweeps_of(trials):
        files |= files_of(sweep)
    if not files:
        raise NothingMeasuredError(
            f"The database has no measured trials, which `--format {format_}` writes. Run `tune run` first."
        )
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

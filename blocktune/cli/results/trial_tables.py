"""Trials as a table for other programs: what `tune export --format csv` and `--format parquet` write."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from blocktune.cli.output.render import note, print_content, print_json
from blocktune.db.exchange.foreign_formats import ExportFormat
from blocktune.kernels.values.errors import NothingMeasuredError, UsageError
from blocktune.kernels.values.text import counted

if TYPE_CHECKING:
    from blocktune.db.records.records import Trial


def write_table(trials: "Sequence[Trial]", format_: ExportFormat, place: str, *, as_json: bool) -> None:
    """Write trials as rows of a table; `-` is standard output, for CSV.

    Raises:
        NothingMeasuredError: there are no trials.
        UsageError: the place cannot be written, or a library is missing.
    """
    if not trials:
        raise NothingMeasuredError("The database has no trials, of which the table is made. Run `tune run` first.")
    if place == "-" and format_ is ExportFormat.PARQUET:
        raise UsageError("Parquet cannot be written to stdout, but got `-`. Name a file, or write CSV.")
    from blocktune.db.exchange.document import save_bytes
    from blocktune.db.exchange.trial_table import csv_text, parquet_bytes, trial_rows

    rows = trial_rows(trials)
    content = parquet_bytes(rows) if format_ is ExportFormat.PARQUET else csv_text(rows).encode()
    if place == "-":
        print_content(content.decode())
        return
    try:
        save_bytes(content, place)
    except OSError as error:
        raise UsageError(f"{place} cannot be written: {error.strerror}. Name another place.") from error
    if as_json:
        print_json({"file": place, "trials": len(rows)})
    else:
        note(f"wrote {counted(len(rows), 'trial')} to {place}")

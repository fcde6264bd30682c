"""Results as studies in Optuna's own storage: what `tune export` writes and `tune import` takes back."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from blocktune.cli.output.render import note, print_json
from blocktune.kernels.values.errors import NothingMeasuredError, UsageError
from blocktune.kernels.values.text import counted

if TYPE_CHECKING:
    from blocktune.db.exchange.document import Document
    from blocktune.db.records.records import AnyTrial


def write_stored_studies(trials: "Sequence[AnyTrial]", place: str, *, as_json: bool) -> None:
    """Write trials as studies, one for every problem and environment.

    Raises:
        UsageError: the place is standard output.
        NothingMeasuredError: there are no trials.
        StoreError: the storage cannot be opened, or the database holds something else.
    """
    if place == "-":
        raise UsageError("Studies cannot be written to stdout, but got `-`. Name an SQLite file or a URL.")
    if not trials:
        raise NothingMeasuredError("The database has no trials, of which studies are made. Run `tune run` first.")
    from blocktune.tuner.sampling.study_exchange import write_studies
    from blocktune.tuner.sampling.study_storage import storage_url

    url = storage_url(place)
    written = write_studies(trials, url)
    if as_json:
        print_json({"url": url, "studies": written})
    else:
        shapes = "one study" if len(written) == 1 else f"{len(written)} studies"
        note(f"wrote {counted(sum(written.values()), 'trial')} in {shapes} to {url}; see optuna-dashboard {url}")


def read_studies(url: str) -> "list[Document]":
    """Return the trials of a storage's studies as documents of results, not yet checked.

    Raises:
        ImportRejectedError: there is no study of a search.
        StoreError: the storage cannot be opened.
    """
    from blocktune.tuner.sampling.study_exchange import documents_of

    return documents_of(url)

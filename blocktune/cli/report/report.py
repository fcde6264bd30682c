"""`tune report`: everything that was measured as one HTML file with pictures that opens without a network."""

from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.output.json_files import writable, write_atomically
from blocktune.cli.output.render import note, print_json
from blocktune.cli.report.sources import Sources, read_sources, shipped_counters, shipped_documents
from blocktune.cli.shared.kernels import trials_of
from blocktune.cli.shared.lookup import shipped_winners
from blocktune.cli.shared.options import AsJson, Database, ShapeFlags, with_optional_shape_flags
from blocktune.cli.shared.stores import existing_store
from blocktune.kernels.values.errors import UsageError, needing

if TYPE_CHECKING:
    from blocktune.db.store import ResultStore
    from blocktune.kernels.values.shape import AttentionShape
    from blocktune.runtime.store_reader.sources import ConfigSource

MAX_SWEEPS = 50
"""Of one report: with more the file would be slow to open."""


@with_optional_shape_flags
def report(
    flags: ShapeFlags | None,
    places: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PLACE]...",
            help="Sweeps, databases or their URLs, exports and what `tune bench`, `ladder`, `replay`, `noise` and "
            "`profile` wrote, or folders of them.  [default: the database and what ships]",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", callback=writable, help="The HTML file to write.")] = Path(
        "report.html"
    ),
    against: Annotated[
        str | None, typer.Option("--against", help="A database or export to compare the winners with.")
    ] = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file of what was measured, predicted, and why.

    It begins with your winners, and has an occupancy explorer, heat maps of recorded sweeps, where the time of a config
    goes, how searches went, a map of the shapes, and the winners of autotuned kernels. It opens from disk and asks for
    nothing from a network. Without a place, it shows your database and what ships with the package; with places, it
    shows only these. The shape flags leave out the sweeps of other shapes.

    \b
    tune report
    tune report results --out h200.html
    tune report my.sweep.json.gz --seq 8192 --dim 64
    """
    require_charts("tune report", "report")
    sources = read_sources(places or ())
    with ExitStack() as stack:
        store = None if places else stack.enter_context(existing_store(db))
        if not places:
            _add_own(sources, store)
        if flags is not None:
            _keep_only(sources, flags.shape())
        if against is not None:
            sources.before = _winners_at(against)
        text = _html(sources, _layers(store, db))
    write_atomically(out, text)
    _print_counts(out, sources, len(text.encode()), as_json=as_json)


def require_charts(command: str, extra: str) -> None:
    """Check that the libraries of the charts are there.

    Args:
        command: what needs them.
        extra: of the package, which brings all that the command needs.

    Raises:
        MissingPackageError: a library of the charts is missing.
    """
    with needing(extra, f"`{command}`"):
        import altair  # noqa: F401
        import vl_convert  # noqa: F401


def _add_own(sources: Sources, store: "ResultStore | None") -> None:
    """Add what the database holds, what ships, and which shapes the user's calls missed."""
    from blocktune.runtime.selection.miss_file import miss_path, read_misses
    from blocktune.tuner.lab.sweep_file import sweeps_of

    if store is not None:
        sources.winners += store.bests()
        sources.kernels += [(best, trials_of(store, best)) for best in store.kernel_bests()]
        sources.sweeps += sweeps_of(store.trials())
    sources.add_shipped_winners(list(shipped_winners()))
    sources.documents += shipped_documents()
    sources.counters |= shipped_counters()
    path = miss_path()
    sources.misses = {} if path is None else read_misses(path)


def _keep_only(sources: Sources, shape: "AttentionShape") -> None:
    """Keep the sweeps of one shape.

    Raises:
        UsageError: there are sweeps, and none is of the shape.
    """
    kept = [sweep for sweep in sources.sweeps if sweep.shape == shape]
    if sources.sweeps and not kept:
        labels = ", ".join(sorted({sweep.shape.label for sweep in sources.sweeps}))
        raise UsageError(f"There is no sweep of {shape.label}, but of {labels}. Change the flags, or leave them out.")
    sources.sweeps = kept


def _winners_at(place: str) -> list[Any]:
    from blocktune.db.records.records import of_attention
    from blocktune.db.sources import read_results

    return of_attention(read_results(place, trials=False).bests)


def _layers(store: "ResultStore | None", db: str | None) -> "list[ConfigSource]":
    """Return where the dispatcher would look for configs: the database, then what ships."""
    from blocktune.db.tables.location import StoreTarget
    from blocktune.runtime.store_reader.sources import JsonConfigs, SqliteConfigs

    if store is None:
        return [JsonConfigs()]
    path = StoreTarget.of(db).path
    return [store if path is None else SqliteConfigs(path), JsonConfigs()]


def _html(sources: Sources, layers: "list[ConfigSource]") -> str:
    from blocktune.cli.report.page import page
    from blocktune.cli.report.page_data import page_data
    from blocktune.tuner.report.sweep_table import sweep_table

    if len(sources.sweeps) > MAX_SWEEPS:
        note(
            f"showing the {MAX_SWEEPS} of {len(sources.sweeps)} sweeps that have the most trials; "
            "name the shape of one by --seq and --dim"
        )
        sources.sweeps = sorted(sources.sweeps, key=lambda sweep: -len(sweep.trials))[:MAX_SWEEPS]
    tables = [sweep_table(sweep) for sweep in sources.sweeps]
    data = page_data(sources, layers, now=datetime.now(UTC))
    return page(data, tables, f"blocktune report, {_devices(sources)}", "blocktune report")


def _devices(sources: Sources) -> str:
    return ", ".join(sorted({device.name for device in sources.devices})) or "no measurements"


def _print_counts(out: Path, sources: Sources, size_bytes: int, *, as_json: bool) -> None:
    counts = {
        "file": str(out),
        "bytes": size_bytes,
        "sweeps": len(sources.sweeps),
        "winners": len(sources.winners),
        "kernels": len(sources.kernels),
        "documents": len(sources.documents) + len(sources.counters),
    }
    if as_json:
        print_json(counts)
        return
    note(
        f"wrote {out}, {size_bytes / 1e6:.1f} MB: {counts['sweeps']} sweeps, {counts['winners']} winners, "
        f"{counts['documents']} other files. Open it in a browser."
    )

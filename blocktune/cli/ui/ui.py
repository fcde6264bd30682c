"""`tune ui`: the views of `tune report` in a browser, while a search runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from blocktune.cli.output.render import note, print_json, say
from blocktune.cli.report.report import require_charts
from blocktune.cli.report.sources import Sources, read_sources
from blocktune.cli.shared.options import AsJson, Database
from blocktune.cli.ui.address import ServerAddress, bound_socket
from blocktune.kernels.values.errors import needing


def ui(
    places: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PLACE]...",
            help="Sweeps, exports and what `tune bench`, `ladder`, `replay` and `noise` wrote, or folders of them, to "
            "show next to the database and what ships.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of 127.0.0.1; 0 is any free one.")] = 0,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Show the views of the report in a browser, live, until Ctrl-C.

    The page follows the database: trials appear as they are stored, even those of another process or on a server. It
    compiles block sizes that were never tried and shows their registers, spills, occupancy and predicted time. The
    database is only read. The server answers only this machine, and only with the token of the printed address.

    \b
    tune ui
    tune ui --db postgresql+psycopg://user@host/tuning
    tune ui results --port 8050
    """
    require_charts("tune ui", "ui")
    _require_server()
    from blocktune.db.tables.location import StoreTarget

    target, sources = StoreTarget.of(db), _sources(places or [])
    with bound_socket(port) as listening:
        address = ServerAddress(listening.getsockname()[1])
        _say_address(address.url, as_json=as_json)
        from blocktune.cli.ui.server import ServerSettings, serve  # seconds, in which the browser already waits

        serve(ServerSettings(target, sources), address, listening)


def _require_server() -> None:
    """Check that the libraries of the server are there.

    Raises:
        MissingPackageError: one is missing.
    """
    with needing("ui", "`tune ui`"):
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401


def _sources(places: list[Path]) -> Sources:
    """Return what the places hold, and which shapes the user's calls missed."""
    from blocktune.runtime.selection.miss_file import miss_path, read_misses

    sources = read_sources(places)
    path = miss_path()
    sources.misses = {} if path is None else read_misses(path)
    return sources


def _say_address(url: str, *, as_json: bool) -> None:
    """Print where the page is, at once: the command goes on."""
    if as_json:
        print_json({"url": url})
    else:
        say(url)
    sys.stdout.flush()
    note("Open this address in a browser of this machine; Ctrl-C ends the server.")

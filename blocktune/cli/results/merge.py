"""`tune merge`: the results of several machines in one database."""

from typing import Annotated

import typer

from blocktune.cli.output.render import note
from blocktune.cli.results.store import Trust, show_imported
from blocktune.cli.shared.options import AsJson, Database
from blocktune.kernels.values.text import counted

Places = Annotated[
    list[str], typer.Argument(metavar="FROM...", help="Databases (paths or URLs), exports or frozen files.")
]


def merge(places: Places, trust: Trust = False, db: Database = None, as_json: AsJson = False) -> None:
    """Add the results of other databases and exports to this one.

    If anything is wrong, nothing is added. Every trial is kept. Of several winners of one shape, the best origin stays
    (measured, borrowed, predicted). Of these, the youngest decides which software counts, and the fastest by that
    software stays. The order of the files does not matter.

    \b
    tune merge node1.db node2.db --trust --db fleet.db
    tune merge a100.json postgresql+psycopg://user@host/results
    """
    from blocktune.db.sources import read_results
    from blocktune.db.store import ResultStore
    from blocktune.db.tables.backups import MERGE_SECONDS

    sources = [read_results(place, trials=True) for place in places]
    with ResultStore.open(db) as store:
        store.back_up(unless_within_seconds=MERGE_SECONDS)
        counts = store.merge(sources, trust=trust)
    left_out = sum(source.left_out for source in sources)
    if left_out:
        note(
            f"left out {counted(left_out, 'winner')} of autotuned kernels: `tune import --trust` takes them from a file"
        )
    show_imported(counts, as_json)

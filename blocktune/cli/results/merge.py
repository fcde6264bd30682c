"""`tune merge`: the results of several machines in one database."""

from typing import Annotated

import typer

from blocktune.cli.results.store import Trust, take_in
from blocktune.cli.shared.options import AsJson, Database

Places = Annotated[
    list[str], typer.Argument(metavar="FROM...", help="Databases (paths or URLs), exports or frozen files.")
]


def merge(places: Places, trust: Trust = False, db: Database = None, as_json: AsJson = False) -> None:
    """Add the results of other databases and exports to this one.

    If anything is wrong, nothing is added. Every trial is kept. Of several winners of one shape, the best origin stays
    (measured, community, borrowed, predicted). Of these, the youngest decides which software counts, and the fastest by
    that software stays. The order of the files does not matter. Winners of autotuned kernels are taken only with
    --trust.

    \b
    tune merge node1.db node2.db --trust --db fleet.db
    tune merge a100.json postgresql+psycopg://user@host/results
    """
    from blocktune.db.sources import read_results

    take_in([read_results(place, trials=True) for place in places], trust=trust, db=db, as_json=as_json)

"""What questions cost on a server with many trials: scale.py SHAPES CONFIGS [OUT]

A server is started, given SHAPES * CONFIGS trials and a winner for every shape, and asked. Prints milliseconds as JSON:
of the server alone (planning and finding) on a connection that is new and on one that is in use, of whole calls, each
on a connection of its own, and of commands in seconds. Writes them to OUT as a table.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from sqlalchemy import Connection, Select, create_engine, select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.pool import NullPool

from blocktune.db.exchange.document import save_text
from blocktune.db.records.reading import id_of
from blocktune.db.records.records import Best
from blocktune.db.records.row_values import document_of
from blocktune.db.store import ResultStore
from blocktune.db.tables.models import BestRow, DeviceRow, ShapeRow, TrialRow
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.measure.environment import source_commit
from tests.support.ranks.document import table
from tests.support.stores.large_servers import fill, shapes_like
from tests.support.stores.postgres_server import PostgresServer, running_server
from tests.support.stores.sample_records import sample_trials, winner

ASKED = 30
COLUMNS = ("what", "measured")


def milliseconds(work: Callable[[], object], times: int = ASKED) -> float:
    """Return the median of what a piece of work takes."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(1e3 * (time.perf_counter() - began))
    return round(statistics.median(taken), 2)


def look_up(row_type: type[BestRow | TrialRow], shape: AttentionShape) -> str:
    """Return the query of `ResultStore.best` or `ResultStore.trials` as SQL."""
    query: Select[tuple[BestRow | TrialRow]] = select(row_type).where(
        row_type.device_id == id_of(DeviceRow, key=winner().device.key),
        row_type.shape_id == id_of(ShapeRow, document=document_of(shape)),
    )
    return str(query.compile(dialect=postgresql.dialect(), compile_kwargs={"literal_binds": True}))  # type: ignore[no-untyped-call]


def on_the_server(connection: Connection, query: str) -> float:
    """Return the milliseconds in which a server plans a query and finds its rows."""
    connection.execute(text("SET join_collapse_limit = 1"))  # as db/tables/engine.py has it
    (plan,) = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {query}").scalar_one()
    return float(plan["Planning Time"] + plan["Execution Time"])


def time_questions(place: str, shapes: list[AttentionShape], dice: random.Random) -> dict[str, float]:
    """Return what questions cost, by their names."""
    engine, device = create_engine(place, poolclass=NullPool), winner().device
    costs: dict[str, float] = {}
    for name, row_type in (("best", BestRow), ("trials", TrialRow)):
        new, used = [], []
        for _ in range(ASKED):
            with engine.connect() as connection:
                new.append(on_the_server(connection, look_up(row_type, dice.choice(shapes))))
                used.append(on_the_server(connection, look_up(row_type, dice.choice(shapes))))
        costs[f"{name} of a shape, server alone, new connection"] = round(statistics.median(new), 2)
        costs[f"{name} of a shape, server alone, used connection"] = round(statistics.median(used), 2)
    with ResultStore.open(place) as store:
        costs["best of a shape, whole call"] = milliseconds(lambda: store.best(device, dice.choice(shapes)))
        costs["record a trial, whole call"] = milliseconds(lambda: store.record(sample_trials(1)[0]))
        costs["trials of a shape, whole call"] = milliseconds(lambda: store.trials(device, dice.choice(shapes)), 3)
        costs["all winners, whole call"] = milliseconds(store.bests, 3)
        costs["nearest winners of a shape, whole call"] = milliseconds(lambda: store.nearest(device, shapes[0]), 3)
    return costs


def command_seconds(place: str, bytecode: str, *words: str) -> tuple[float, float]:
    """Return what a command takes from start to end, and how much of that on a processor. Its first run leaves the
    bytecode of its modules in a folder; an installed package has it."""
    command = [sys.executable, "-P", "-m", "blocktune", *words, "--db", place]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": bytecode}
    began, before = time.perf_counter(), os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return round(time.perf_counter() - began, 2), round(used, 2)


def _compared_winner(best: Best) -> Best:
    """Return a winner that was compared with a default, as those of searches are."""
    default = replace(best.config, num_stages=best.config.num_stages + 1)
    return replace(best, default=default, default_time_us=120.0, speedup_over_default=1.2)


def put_first(server: PostgresServer) -> bool:
    """Have this process, the server and what either starts run before all others of a busy machine. Return whether that
    was allowed."""
    postmaster = int((server.data / "postmaster.pid").read_text().split()[0])
    try:
        for process in (postmaster, os.getpid()):
            os.sched_setscheduler(process, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    return True


def save(costs: Mapping[str, float], server_version: str, out: Path, *, first: bool) -> None:
    """Write what was measured as a table."""
    how = f"a server with {costs['trials']:,} trials on the same machine, whose load was {os.getloadavg()[1]:.0f}; "
    how += "both ran before all other processes; " * first
    how += f"medians of {ASKED} questions, in milliseconds unless a row says otherwise."
    environment = {"postgresql": server_version} | {name: version(name) for name in ("sqlalchemy", "psycopg")}
    document = {
        "device": f"{os.cpu_count()} processors",
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": source_commit(),
        "environment": environment,
    }
    rows = [[name, f"{cost:,}"] for name, cost in costs.items()]
    save_text(json.dumps(table(document, how, COLUMNS, rows), indent=1, sort_keys=True) + "\n", out)


def main(shapes: int, configs: int, out: Path | None) -> None:
    best = _compared_winner(winner())
    with running_server({"shared_buffers": "512MB", "max_wal_size": "8GB"}) as server:
        place = server.create_database("scale")
        began = time.perf_counter()
        fill(place, sample_trials(1)[0], best, shapes=shapes, configs=configs)
        costs: dict[str, float] = {"filled, seconds": round(time.perf_counter() - began, 1)}
        first = put_first(server)
        costs |= time_questions(place, shapes_like(best.shape, shapes), random.Random(0))
        one = ("--seq", "8192", "--dim", "64", "--device", "h200")
        with tempfile.TemporaryDirectory() as bytecode:
            for name, words in (("list", ()), ("best", one)):
                whole, used = min(command_seconds(place, bytecode, name, *words) for _ in range(3))
                costs |= {f"tune {name}, seconds": whole, f"tune {name}, processor seconds": used}
        ((size, server_version),) = server.execute(
            "SELECT pg_database_size('scale'), current_setting('server_version')"
        )
    costs = {"trials": shapes * configs, "winners": shapes, "gigabytes": round(int(size) / 1e9, 2)} | costs
    sys.stdout.write(json.dumps(costs, indent=1) + "\n")
    if out is not None:
        save(costs, str(server_version).split()[0], out, first=first)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)

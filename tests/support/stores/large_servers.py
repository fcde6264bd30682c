"""Databases of millions of trials on a server, made there: one by one they would take days."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import URL, Connection, create_engine, insert, select, text

from blocktune.db.records.records import Best, Trial
from blocktune.db.records.row_checksums import record_checksum, served_checksum
from blocktune.db.records.row_values import config_columns, document_of, shape_columns
from blocktune.db.store import ResultStore
from blocktune.db.tables.models import BestRow, ConfigRow, ShapeRow, TrialRow
from blocktune.kernels.values.shape import AttentionShape

_LINKS = ("id", "shape_id", "config_id", "checksum")


def shapes_like(shape: AttentionShape, count: int) -> list[AttentionShape]:
    """Return shapes that differ in their lengths, from 10,000 on."""
    return [replace(shape, seqlen_q=10_000 + number, seqlen_k=10_000 + number) for number in range(count)]


def fill(place: str | URL, trial: Trial, best: Best, *, shapes: int, configs: int) -> None:
    """Give a new store `shapes * configs` trials, and a winner for every shape, like the ones given.

    The copied trials have no checksum, which is how rows of an older blocktune are; winners have theirs.
    """
    with ResultStore.open(str(place)) as store:
        store.record(trial)
        store.set_best(replace(best, shape=trial.shape))
    engine = create_engine(place)
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL session_replication_role = replica"))  # no foreign keys are checked
        _add(
            connection,
            ShapeRow,
            [(document_of(each), shape_columns(each)) for each in shapes_like(trial.shape, shapes)],
        )
        varied = [replace(trial.config, extra=(("n", number),)) for number in range(configs)]
        _add(connection, ConfigRow, [(document_of(each), config_columns(each)) for each in varied])
        new = "shape.seqlen_q >= 10000 AND config.document LIKE '%\"n\":%'"
        _copy_trials(connection, f"shape CROSS JOIN config WHERE {new}")
        _add_winners(connection, [replace(best, shape=each) for each in shapes_like(trial.shape, shapes)])
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    engine.dispose()


def _add(connection: Connection, row_type: type[ShapeRow | ConfigRow], rows: Sequence[tuple[str, Any]]) -> None:
    connection.execute(insert(row_type), [{"document": document, **columns} for document, columns in rows])


def _copy_trials(connection: Connection, pairs: str) -> None:
    """Add the first trial again for every pair of a shape and a config."""
    kept = [column.name for column in TrialRow.__table__.columns if column.name not in _LINKS]
    values = ", ".join(f"first.{name}" for name in kept)
    connection.execute(
        text(
            f"INSERT INTO trial (shape_id, config_id, {', '.join(kept)}) SELECT shape.id, config.id, {values} "
            f"FROM (SELECT * FROM trial ORDER BY id LIMIT 1) AS first, {pairs}"
        )
    )


def _add_winners(connection: Connection, bests: Sequence[Best]) -> None:
    """Add winners that differ from the first one in their shapes alone."""
    first = connection.execute(select(*BestRow.__table__.c).limit(1)).one()._asdict()
    ids = {document: row_id for row_id, document in connection.execute(select(ShapeRow.id, ShapeRow.document))}
    own = (
        {
            "shape_id": ids[document_of(best.shape)],
            "checksum": record_checksum(best),
            "served_checksum": served_checksum(best),
        }
        for best in bests
    )
    del first["id"]
    connection.execute(insert(BestRow), [first | values for values in own])


def plan_of(connection: Connection, statement: str) -> list[Any]:
    """Return how the server would find the rows of a query."""
    plan: list[Any] = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}").scalar_one()
    return plan

"""Many rows with the rows that they refer to, by one query for each table.

A winner refers to seven rows. Joined to it, the document of a device would be sent and handled once for each of its
winners; here it is once.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Select, Table, select
from sqlalchemy.orm import Session


class LinkedRow(SimpleNamespace):
    """A row's columns, and under `device`, `shape` and so on the rows that it refers to, None where there is none."""

    __table__: Table


def linked_rows(session: Session, query: Select[Any]) -> list[LinkedRow]:
    """Return the rows of a query as its mapped class would have them, for reading alone.

    Where others write at the same time, a row that it refers to may be missing: the queries of a server see different
    moments.

    Args:
        session: of the store.
        query: selects rows of one mapped class.
    """
    table = _table_of(query)
    rows = session.execute(own_columns(query)).all()
    linked = {name: {row.id: row for row in session.execute(each)} for name, each in targets(query).items()}
    return [
        LinkedRow(
            __table__=table,
            **row._mapping,
            **{name: found.get(getattr(row, f"{name}_id")) for name, found in linked.items()},
        )
        for row in rows
    ]


@cache
def links_of(table: Table) -> dict[str, Table]:
    """Return the tables that a row refers to, by the name of the reference: `shape` for the column `shape_id`."""
    return {key.parent.name.removesuffix("_id"): key.column.table for key in table.foreign_keys}


def own_columns(query: Select[Any]) -> Select[Any]:
    """Return the query of the rows without those that they refer to."""
    return query.with_only_columns(*_table_of(query).c)


def targets(query: Select[Any]) -> dict[str, Select[Any]]:
    """Return the query of the rows that each reference of a query's rows leads to, by the name of the reference."""
    table, found = _table_of(query), {}
    for name, target in links_of(table).items():
        wanted = query.with_only_columns(table.c[f"{name}_id"]).order_by(None)
        found[name] = select(target).where(target.c.id.in_(wanted))
    return found


def _table_of(query: Select[Any]) -> Table:
    table: Table = query.column_descriptions[0]["entity"].__table__
    return table

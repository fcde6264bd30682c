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
    table: Table = query.column_descriptions[0]["entity"].__table__
    names = table.c.keys()
    rows = [dict(zip(names, row, strict=True)) for row in session.execute(query.with_only_columns(*table.c))]
    for name in links_of(table):
        found, link = _targets(session, query, table, name), f"{name}_id"
        for row in rows:
            row[name] = found.get(row[link])
    return [LinkedRow(__table__=table, **row) for row in rows]


@cache
def links_of(table: Table) -> dict[str, Table]:
    """Return the tables that a row refers to, by the name of the reference: `shape` for the column `shape_id`."""
    return {key.parent.name.removesuffix("_id"): key.column.table for key in table.foreign_keys}


def _targets(session: Session, query: Select[Any], table: Table, name: str) -> dict[int, Any]:
    """Return the rows that one column of a query's rows refers to, by their ids."""
    target, wanted = links_of(table)[name], query.with_only_columns(table.c[f"{name}_id"]).order_by(None)
    return {row.id: row for row in session.execute(select(target).where(target.c.id.in_(wanted)))}

"""Which winners are near a shape, by columns that are not checked: the nearest ones alone are read whole."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import nsmallest
from typing import Any

from sqlalchemy import ColumnElement, Double, Executable, Select, and_, case, cast, func

from blocktune.db.records.row_values import UNREADABLE
from blocktune.db.tables.models import BestRow, ShapeRow
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import ELEMENT_BYTES, AttentionShape

Distance = Callable[[AttentionShape, AttentionShape], float]


def nearest_ids(query: Select[tuple[BestRow]], shape: AttentionShape, limit: int) -> Select[Any]:
    """Return a query for the ids of winners that run a shape's code, nearest first: by the logarithms of their
    lengths, then of their number of heads.

    Args:
        query: selects winners.
        shape: of interest.
        limit: how many ids at most.
    """
    lengths = _times(ShapeRow.seqlen_q, shape.seqlen_q) * _times(ShapeRow.seqlen_k, shape.seqlen_k)
    heads = _times(cast(ShapeRow.batch, Double) * ShapeRow.num_heads, shape.batch * shape.num_heads)
    sizes = (ShapeRow.seqlen_q, ShapeRow.seqlen_k, ShapeRow.num_heads, ShapeRow.num_heads_kv, ShapeRow.batch)
    same_code = (
        ShapeRow.dtype == shape.dtype,
        ShapeRow.causal == str(shape.causal),
        ShapeRow.num_heads == ShapeRow.num_heads_kv * shape.group_size,
    )
    alike = query.join(BestRow.shape).where(_is_of_kind(shape), *same_code)
    return alike.with_only_columns(BestRow.id).order_by(lengths, heads, *sizes).limit(limit)


def outlines(query: Select[tuple[BestRow]], shape: AttentionShape) -> Executable:
    """Return a query for id, origin and shape document of the winners of a shape's kind: of its direction, head
    dimensions, features and size of elements."""
    alike = query.join(BestRow.shape).where(_is_of_kind(shape))
    return alike.with_only_columns(BestRow.id, BestRow.origin, ShapeRow.document)


def nearest_outlines(
    found: Iterable[Any], shapes: Sequence[AttentionShape], distance: Distance, limit: int
) -> set[int]:
    """Return the ids of the winners of each origin that are nearest to one of several shapes, and of those whose shape
    cannot be read, so that whoever reads them says so.

    Args:
        found: what the query of `outlines` gave.
        shapes: of interest.
        distance: of two shapes.
        limit: how many winners of an origin for each of the shapes.
    """
    by_origin: defaultdict[str, list[tuple[int, AttentionShape]]] = defaultdict(list)
    chosen: set[int] = set()
    for row_id, origin, document in found:
        try:
            by_origin[origin].append((row_id, AttentionShape.from_json(json.loads(document))))
        except UNREADABLE:
            chosen.add(row_id)
    for winners in by_origin.values():
        for shape in shapes:
            chosen.update(row_id for row_id, _ in nsmallest(limit, winners, key=partial(_far, distance, shape)))
    return chosen


def _far(distance: Distance, shape: AttentionShape, winner: tuple[int, AttentionShape]) -> float:
    return distance(winner[1], shape)


def _is_of_kind(shape: AttentionShape) -> ColumnElement[bool]:
    alike = [name for name, size in ELEMENT_BYTES.items() if size == shape.element_bytes]
    equal = (
        ShapeRow.direction == str(shape.direction),
        ShapeRow.head_dim == shape.head_dim,
        ShapeRow.head_dim_v == shape.head_dim_v,
    )
    return and_(ShapeRow.dtype.in_(alike), *equal, _has_features(shape.features))


def _has_features(features: Features) -> ColumnElement[bool]:
    """Return the condition that a shape has these features, which its document alone tells."""
    if not features:
        return ~ShapeRow.document.contains('"features":', autoescape=True)
    return ShapeRow.document.contains(f'"features":"{features.label}"', autoescape=True)


def _times(column: Any, value: int) -> ColumnElement[float]:
    """Return how many times a column is larger than a value, or smaller: products of these are in the order of sums of
    logarithms, and not every SQLite has a logarithm."""
    ratio = cast(column, Double) / float(value)
    return case((ratio < 1.0, 1.0 / func.nullif(ratio, 0.0)), else_=ratio)

"""Which shapes and rows of a file belong to a bar."""

from collections.abc import Callable, Collection, Sequence

from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import AttentionShape, Direction

Chosen = Callable[[AttentionShape], bool]

TILE = 64
"""Lengths that it does not divide are ragged."""


def shapes(
    *dims: int,
    features: str = "",
    grouped: bool = False,
    narrow: bool = False,
    ragged: bool = False,
    direction: Direction | None = None,
) -> Chosen:
    """Return which shapes have one of these head dimensions and the rest.

    Args:
        dims: head dimensions.
        features: as shapes name them.
        grouped: query heads share keys.
        narrow: values have fewer columns than keys.
        ragged: no tile divides the length.
        direction: None for both.
    """

    def chosen(shape: AttentionShape) -> bool:
        has = (shape.group_size > 1, shape.head_dim_v < shape.head_dim, shape.seqlen_q % TILE > 0)
        return (
            shape.head_dim in dims
            and shape.features.label == features
            and has == (grouped, narrow, ragged)
            and direction in (None, shape.direction)
        )

    return chosen


def forward(shape: AttentionShape) -> bool:
    return shape.direction is Direction.FORWARD


def block_masked(shape: AttentionShape) -> bool:
    return shape.features.mask is MaskKind.BLOCK_SPARSE


def words(*wanted: str, without: Collection[str] = ()) -> Callable[[Sequence[str]], bool]:
    """Return which rows of a table have one of some words in their first cell, and none of others."""

    def chosen(cells: Sequence[str]) -> bool:
        own = set(cells[0].split())
        return bool(own & set(wanted)) and not own & set(without)

    return chosen

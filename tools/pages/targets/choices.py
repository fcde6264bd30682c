"""Which shapes and rows of a file belong to a target."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import AttentionShape, Direction

Chosen = Callable[[AttentionShape], bool]

TILE = 64
"""Lengths that it does not divide are ragged."""


def forwards(
    *dims: int, features: str = "", grouped: bool = False, narrow: bool = False, ragged: bool = False
) -> Chosen:
    """Return which shapes are forwards of one of these head dimensions and the rest.

    Args:
        dims: head dimensions.
        features: as shapes name them.
        grouped: query heads share keys.
        narrow: values have fewer columns than keys.
        ragged: no tile divides the length.
    """

    def chosen(shape: AttentionShape) -> bool:
        has = (shape.group_size > 1, shape.head_dim_v < shape.head_dim, shape.seqlen_q % TILE > 0)
        return (
            is_forward(shape)
            and shape.head_dim in dims
            and shape.features.label == features
            and has == (grouped, narrow, ragged)
        )

    return chosen


def backwards(*dims: int, **rest: Any) -> Chosen:
    """Return which shapes are the backwards of such forwards."""
    chosen = forwards(*dims, **rest)
    return lambda shape: not is_forward(shape) and chosen(replace(shape, direction=Direction.FORWARD))


def biased_shapes(direction: Callable[..., Chosen]) -> Chosen:
    """Return which shapes of head_dim 64 and 128 have ALiBi or a mask of all pairs, and nothing else.

    Args:
        direction: `forwards` or `backwards`.
    """
    kinds = [direction(64, 128, features=features) for features in ("alibi", "boolean", "additive")]
    return lambda shape: any(chosen(shape) for chosen in kinds)


def is_forward(shape: AttentionShape) -> bool:
    return shape.direction is Direction.FORWARD


def block_masked(shape: AttentionShape) -> bool:
    return shape.features.mask is MaskKind.BLOCK_SPARSE


def words(*wanted: str) -> Callable[[Sequence[str]], bool]:
    """Return which rows of a table have one of some words in their first cell."""
    return lambda cells: not set(wanted).isdisjoint(cells[0].split())

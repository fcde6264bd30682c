"""Bases of places: what two layouts have in common, and which banks of shared memory their elements are stored in."""

from collections.abc import Sequence

BANK_BITS = 32
LINE_BITS = 1024
"""All 32 banks of shared memory."""


def common(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the places of `first`, without zeros, that are in `second` too."""
    return [place for place in first if place and place in second]


def line_starts(source: Sequence[int], target: Sequence[int], dimensions: int, count: int) -> list[int]:
    """Return `count` places that tell one line of all banks from another, free of bank conflicts if that can be.

    Args:
        source: places that one instruction of the writing threads covers.
        target: those of the reading threads.
        dimensions: bits of a place.
    """
    free = [1 << bit for bit in range(dimensions) if 1 << bit not in source and 1 << bit not in target]
    if len(free) >= count:
        return free[:count]
    shared = common(source, target)
    sides = [sorted({place for place in side if place and place not in shared}) for side in (source, target)]
    fewer, more = sorted(sides, key=len)
    conflicts = min(max(0, count - len(fewer) - len(free)), len(fewer))
    crossed = [one ^ other for one, other in zip(fewer[conflicts:], more[conflicts:], strict=False)]
    return [*free, *crossed, *fewer[:conflicts], *more[:conflicts]][:count]

"""Which tokens of a sequence each rank holds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

from blocktune.kernels.values.errors import UsageError

Range = tuple[int, int]
"""Tokens or rows from the first to before the second."""

ZIGZAG, CONTIGUOUS = "zigzag", "contiguous"


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Which tokens each rank holds: rank r has those of ranges[r], (start, stop) in ascending order.

    Raises:
        UsageError: a token is held by no rank or by two, or the ranges of a rank do not ascend.
    """

    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        ends = [0] + [stop for _, stop in sorted(self._all)]
        starts = [start for start, _ in sorted(self._all)]
        ascend = all(before[1] <= after[0] for own in self.ranges for before, after in pairwise(own))
        if not self.ranges or starts != ends[:-1] or any(start >= stop for start, stop in self._all) or not ascend:
            raise UsageError(
                "Every token must be held by one rank, in ascending ranges (start, stop) that are not empty, but got "
                f"{self.ranges}. `zigzag`, `contiguous` and `of_lengths` make such layouts."
            )

    @classmethod
    def zigzag(cls, seqlen: int, num_ranks: int) -> Self:
        """Return the layout in which rank r of n has the parts r and 2n - 1 - r of 2n, so that causal ranks have equal
        work."""
        bounds = _bounds(seqlen, 2 * num_ranks)
        parts = list(pairwise(bounds))
        return cls(tuple(coalesce((parts[rank], parts[-1 - rank])) for rank in range(num_ranks)))

    @classmethod
    def contiguous(cls, seqlen: int, num_ranks: int) -> Self:
        """Return the layout in which rank r of n has part r of n."""
        return cls(tuple(coalesce((part,)) for part in pairwise(_bounds(seqlen, num_ranks))))

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> Self:
        """Return the layout in which each rank has this many tokens, one rank after the other."""
        return cls(tuple(coalesce((part,)) for part in pairwise((0, *accumulate(lengths)))))

    @property
    def _all(self) -> list[Range]:
        return [part for own in self.ranges for part in own]

    @property
    def seqlen(self) -> int:
        """Tokens of the whole sequence."""
        return sum(stop - start for start, stop in self._all)

    @property
    def num_ranks(self) -> int:
        """Ranks that share the sequence, those without tokens too."""
        return len(self.ranges)

    def length(self, rank: int) -> int:
        """Count the tokens of a rank."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def joined(self, size: int) -> Self:
        """Return the layout of groups of `size` successive ranks, each with the tokens of all its members."""
        groups = (self.ranges[first : first + size] for first in range(0, self.num_ranks, size))
        return type(self)(tuple(coalesce(part for own in group for part in own) for group in groups))


def find_layout(layout: SequenceLayout | str, seqlen: int, num_ranks: int) -> SequenceLayout:
    """Return the layout with a name, `zigzag` or `contiguous`; a layout as it is.

    Raises:
        UsageError: no layout has the name, or it is of another number of ranks.
    """
    if isinstance(layout, SequenceLayout):
        if layout.num_ranks != num_ranks:
            raise UsageError(
                f"`layout` must have as many ranks as the group, but got {layout.num_ranks} and {num_ranks}. "
                "Make the layout for this group."
            )
        return layout
    if layout == ZIGZAG:
        return SequenceLayout.zigzag(seqlen, num_ranks)
    if layout == CONTIGUOUS:
        return SequenceLayout.contiguous(seqlen, num_ranks)
    raise UsageError(
        f"`layout` must be {ZIGZAG!r}, {CONTIGUOUS!r} or a SequenceLayout, but got {layout!r}. Give the one that the "
        "sequence was split by."
    )


def coalesce(parts: Iterable[Range]) -> tuple[Range, ...]:
    """Return the ranges in ascending order without empty ones, adjacent ones as one."""
    found: list[Range] = []
    for start, stop in sorted(parts):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def rows_of(parts: Sequence[Range]) -> tuple[Range, ...]:
    """Return the rows at which each of the ranges is in a tensor that holds one after the other."""
    return tuple(pairwise(accumulate((stop - start for start, stop in parts), initial=0)))


def _bounds(seqlen: int, parts: int) -> list[int]:
    """Return where parts begin whose sizes differ by one token at most."""
    return [number * seqlen // parts for number in range(parts + 1)]

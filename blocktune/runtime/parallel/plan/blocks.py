"""Plans the attention calls that compute all pairs of some queries and some keys.

A query at position p sees the keys from p - left to p + right of its own document. Queries and keys come as ranges of
positions, and the rows of tensors hold one range after the other.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from blocktune.kernels.values.features import UNLIMITED
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.parallel.plan.layout import Range, rows_of


@dataclass(frozen=True, slots=True)
class Sight:
    """How far a query sees: `left` keys before it and `right` after it, inf without bound, in documents that begin at
    `bounds`, the last of which is the end of the sequence."""

    left: float
    right: float
    bounds: tuple[int, ...]

    @property
    def orders_only(self) -> bool:
        """Whether all that counts is which of two tokens comes first."""
        return self.left == inf and self.right == 0 and len(self.bounds) == 2


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """One call of attention: rows of the queries and of the keys, and a diagonal from the lower right.

    A window on its right side is -1 where the causal mask bounds it. bounds_q and bounds_k are those of packed
    sequences, from the first row on; empty for one sequence.
    """

    queries: Range
    keys: Range
    causal: Causal
    window: tuple[int, int]
    bounds_q: tuple[int, ...] = ()
    bounds_k: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether every query sees every key."""
        return self.causal is Causal.NONE and self.window == (UNLIMITED, UNLIMITED) and not self.bounds_q

    def in_parts(self, num_queries: int) -> "tuple[AttentionBlock, ...]":
        """Return blocks of this number of queries each; the block itself where queries do not see all of its keys."""
        if not self.is_plain:
            return (self,)
        first, last = self.queries
        begins = range(first, last, num_queries)
        return tuple(replace(self, queries=(begin, min(begin + num_queries, last))) for begin in begins)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each of its sequences."""
        if not self.bounds_q:
            return ((self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]),)
        steps = zip(pairwise(self.bounds_q), pairwise(self.bounds_k), strict=True)
        return tuple((last_q - first_q, last_k - first_k) for (first_q, last_q), (first_k, last_k) in steps)


@dataclass(frozen=True, slots=True)
class _Part:
    """Positions in one document, where every query sees a key and every key is seen; left and right: the
    window from the diagonal that ends at the last query and the last key."""

    queries: Range
    keys: Range
    left: float
    right: float


def own_blocks(parts: Sequence[Range], sight: Sight) -> tuple[AttentionBlock, ...]:
    """Return the calls for queries and keys of the same ranges."""
    rows = sum(stop - start for start, stop in parts)
    if sight.orders_only and parts and parts[-1][1] <= sight.bounds[-1]:  # gaps do not change which token is first
        return (AttentionBlock((0, rows), (0, rows), Causal.LOWER_RIGHT, (UNLIMITED, UNLIMITED)),)
    return blocks_of(parts, parts, sight)


def blocks_of(queries: Sequence[Range], keys: Sequence[Range], sight: Sight) -> tuple[AttentionBlock, ...]:
    """Return the calls for the queries of some ranges and the keys of others."""
    found: list[AttentionBlock] = []
    for own, rows in zip(queries, rows_of(queries), strict=True):
        of_queries: list[AttentionBlock] = []
        for their, their_rows in zip(keys, rows_of(keys), strict=True):
            of_pair = _group_parts(list(_parts(own, their, sight)), rows[0] - own[0], their_rows[0] - their[0])
            of_queries = _unite_blocks([*of_queries, *of_pair])
        found = _unite_blocks([*found, *of_queries])
    return tuple(found)


def visible_range(queries: Sequence[Range], keys: Range, sight: Sight) -> Range | None:
    """Return the smallest range of keys with all that the queries see of these keys; None if they see none."""
    seen = [part.keys for own in queries for part in _parts(own, keys, sight)]
    return (min(start for start, _ in seen), max(stop for _, stop in seen)) if seen else None


def _parts(queries: Range, keys: Range, sight: Sight) -> Iterator[_Part]:
    """Yield what each document has of the queries and of the keys, without those that see or show nothing."""
    bounds = sight.bounds
    first = bisect_right(bounds, max(queries[0], keys[0])) - 1
    last = bisect_left(bounds, min(queries[1], keys[1]))
    for start, stop in pairwise(bounds[first : last + 1]):
        part = _within(queries, keys, (start, stop), sight)
        if part is not None:
            yield part


def _within(queries: Range, keys: Range, document: Range, sight: Sight) -> _Part | None:
    """Return what a document has of the queries and of the keys, without those that see or show nothing."""
    (first_q, last_q), (first_k, last_k) = (
        (max(part[0], document[0]), min(part[1], document[1])) for part in (queries, keys)
    )
    first_q, last_q = int(max(first_q, first_k - sight.right)), int(min(last_q, last_k + sight.left))
    first_k, last_k = int(max(first_k, first_q - sight.left)), int(min(last_k, last_q + sight.right))
    if first_q >= last_q or first_k >= last_k:
        return None
    return _Part((first_q, last_q), (first_k, last_k), sight.left + last_k - last_q, sight.right + last_q - last_k)


def _group_parts(parts: list[_Part], shift_q: int, shift_k: int) -> list[AttentionBlock]:
    """Return the calls for parts of successive documents: as packed sequences where rows and windows allow it.

    shift_q and shift_k make rows of positions.
    """
    groups: list[list[_Part]] = []
    for part in parts:
        before = groups[-1][-1] if groups else None
        if before is not None and _follows(part, before):
            groups[-1].append(part)
        else:
            groups.append([part])
    return [_block(group, shift_q, shift_k) for group in groups]


def _follows(part: _Part, before: _Part) -> bool:
    adjacent = before.queries[1] == part.queries[0] and before.keys[1] == part.keys[0]
    return adjacent and (before.left, before.right) == (part.left, part.right)


def _block(group: list[_Part], shift_q: int, shift_k: int) -> AttentionBlock:
    """Return the call for documents with one window."""
    (first_q, first_k), (last_q, last_k) = (
        (group[0].queries[0], group[0].keys[0]),
        (group[-1].queries[1], group[-1].keys[1]),
    )
    longest_q = max(part.queries[1] - part.queries[0] for part in group)
    longest_k = max(part.keys[1] - part.keys[0] for part in group)
    left = _side(group[0].left, longest_k)
    right = _side(group[0].right, longest_q)
    causal = Causal.LOWER_RIGHT if right == 0 else Causal.NONE
    return AttentionBlock(
        (first_q + shift_q, last_q + shift_q),
        (first_k + shift_k, last_k + shift_k),
        causal,
        (left, UNLIMITED if right == 0 else right),
        _bounds([part.queries for part in group]),
        _bounds([part.keys for part in group]),
    )


def _bounds(parts: list[Range]) -> tuple[int, ...]:
    """Return where packed sequences begin, and the end of the last one, from the first on; nothing of one sequence."""
    first = parts[0][0]
    return tuple(bound - first for bound in (*(start for start, _ in parts), parts[-1][1])) if len(parts) > 1 else ()


def _side(reach: float, length: int) -> int:
    """Return a side of a window; none that all the keys are in."""
    return UNLIMITED if reach >= length - 1 else int(reach)


def _unite_blocks(blocks: list[AttentionBlock]) -> list[AttentionBlock]:
    """Return the calls with those as one in which every query sees every key, where the rows allow it."""
    found: list[AttentionBlock] = []
    for block in blocks:
        one = _union(found[-1], block) if found else None
        if one is None:
            found.append(block)
        else:
            found[-1] = one
    return found


def _union(before: AttentionBlock, after: AttentionBlock) -> AttentionBlock | None:
    if not (before.is_plain and after.is_plain):
        return None
    if before.queries == after.queries and before.keys[1] == after.keys[0]:
        return replace(before, keys=(before.keys[0], after.keys[1]))
    if before.keys == after.keys and before.queries[1] == after.queries[0]:
        return replace(before, queries=(before.queries[0], after.queries[1]))
    return None

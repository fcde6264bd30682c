"""Which rows of a sum are added where, when blocks find something for ranges of the same rows one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from blocktune.runtime.parallel.plan.layout import Range


@dataclass(frozen=True, slots=True)
class Addition:
    """Rows to which a block adds. reads_wide: their sum so far is a float32 one. writes_wide: more will be added."""

    rows: Range
    reads_wide: bool
    writes_wide: bool


@lru_cache(maxsize=256)
def additions_of(length: int, blocks: tuple[Range, ...]) -> tuple[tuple[Addition, ...], ...]:
    """Return what each block adds to `length` rows that hold the results of the first block if it covers all of them,
    and zeros otherwise."""
    is_whole = blocks[:1] == ((0, length),)
    bounds = sorted({0, length, *(bound for rows in blocks for bound in rows)})
    found = []
    for number, rows in enumerate(blocks):
        segments = [part for part in pairwise(bounds) if _covers(rows, part)]
        before, after = blocks[is_whole:number], blocks[number + 1 :]
        additions = [
            Addition(part, any(_covers(one, part) for one in before), any(_covers(one, part) for one in after))
            for part in segments
        ]
        found.append(() if is_whole and number == 0 else _join_adjacent(additions))
    return tuple(found)


def _covers(rows: Range, part: Range) -> bool:
    return rows[0] <= part[0] and part[1] <= rows[1]


def _join_adjacent(additions: Sequence[Addition]) -> tuple[Addition, ...]:
    """Return the additions with adjacent ones of a kind as one."""
    found: list[Addition] = []
    for addition in additions:
        if found and replace(found[-1], rows=addition.rows) == addition:
            found[-1] = replace(addition, rows=(found[-1].rows[0], addition.rows[1]))
        else:
            found.append(addition)
    return tuple(found)

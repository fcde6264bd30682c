"""Which key tiles the blocks of a grid visit: what causal skipping and a window leave to do."""

from dataclasses import dataclass
from functools import lru_cache

from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.kernels.values.visible_ranges import key_spans, whole_key_tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitCounts:
    """The key tiles that one head's query tiles visit.

    query_tiles: blocks per head. total: key tiles that they visit together, at full cost each even where a part is
    masked. masked: those among them that are masked. longest: the most that one block visits.
    """

    query_tiles: int
    total: int
    masked: int
    longest: int

    @property
    def mean(self) -> float:
        return self.total / self.query_tiles


@lru_cache(maxsize=256)  # the same ones are wanted for many configs of a shape
def visits_of(shape: AttentionShape, block_m: int, block_n: int) -> VisitCounts:
    """Count tiles as the kernels walk them: invisible ones are skipped, diagonal and ragged ones are masked, and every
    block visits one at least."""
    starts = range(0, shape.seqlen_q, block_m)
    if shape.features.window is None and shape.causal is Causal.NONE:
        visited = max(1, -(-shape.seqlen_k // block_n))
        masked = 1 if shape.seqlen_k % block_n else 0
        return VisitCounts(
            query_tiles=len(starts), total=visited * len(starts), masked=masked * len(starts), longest=visited
        )
    counts = _counts(shape, block_m, block_n)
    return VisitCounts(
        query_tiles=len(starts),
        total=sum(visited for visited, _ in counts),
        masked=sum(masked for _, masked in counts),
        longest=max(visited for visited, _ in counts),
    )


def keys_loaded(shape: AttentionShape, block_m: int, block_n: int) -> tuple[int, ...]:
    """Return, for every query tile of a head, the keys that its block loads: whole tiles, none of them past the end; 0
    where no query of the tile sees a key."""
    starts = range(0, shape.seqlen_q, block_m)
    if shape.causal is Causal.NONE:
        return (shape.seqlen_k,) * len(starts)
    tiles = (
        -(-_visible_key_count(start + block_m, shape.causal_offset, shape.seqlen_k) // block_n) for start in starts
    )
    return tuple(min(count * block_n, shape.seqlen_k) for count in tiles)


def _counts(shape: AttentionShape, block_m: int, block_n: int) -> list[tuple[int, int]]:
    """Return (visited, masked) key tiles of every query tile."""
    if shape.features.window is None:
        starts, offset, keys = range(0, shape.seqlen_q, block_m), shape.causal_offset, shape.seqlen_k
        seen = [
            (_visible_key_count(start + block_m, offset, keys), _visible_key_count(start + 1, offset, keys))
            for start in starts
        ]
        visited_tiles = [max(1, -(-last // block_n)) for last, _ in seen]
        return [(tiles, tiles - first // block_n) for tiles, (_, first) in zip(visited_tiles, seen, strict=True)]
    loaded, whole = key_spans(shape, block_m, block_n), whole_key_tiles(shape, block_m, block_n)
    visited = [max(1, -(-len(span) // block_n)) for span in loaded]
    return [(tiles, tiles - min(full, tiles)) for tiles, full in zip(visited, whole, strict=True)]


def _visible_key_count(queries: int, offset: int, keys: int) -> int:
    """Return how many of the keys the first `queries` queries see together where query i sees keys 0..i + offset."""
    return min(max(queries + offset, 0), keys)

"""Which key tiles the blocks of a grid visit: what causal skipping and a window leave to do."""

from dataclasses import dataclass

from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.kernels.values.visible_ranges import key_spans, whole_key_tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitCounts:
    """The key tiles of all query tiles of one head.

    query_tiles: blocks a head. total: key tiles that they visit together, at full cost each even where a part is
    masked. masked: those among them that are masked. longest: the most that one block visits.
    """

    query_tiles: int
    total: int
    masked: int
    longest: int

    @property
    def mean(self) -> float:
        return self.total / self.query_tiles


def visits_of(shape: AttentionShape, block_m: int, block_n: int) -> VisitCounts:
    """Counts tiles as the kernels walk them: invisible ones are skipped, diagonal and ragged ones are masked, and every
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
    """For every query tile of a head, the keys that its block loads: whole tiles, none of them past the end; 0 where no
    query of the tile sees a key."""
    starts = range(0, shape.seqlen_q, block_m)
    if shape.causal is Causal.NONE:
        return (shape.seqlen_k,) * len(starts)
    tiles = (-(-_seen(shape, start + block_m) // block_n) for start in starts)
    return tuple(min(count * block_n, shape.seqlen_k) for count in tiles)


def _counts(shape: AttentionShape, block_m: int, block_n: int) -> list[tuple[int, int]]:
    """(visited, masked) key tiles of every query tile."""
    if shape.features.window is None:
        starts = range(0, shape.seqlen_q, block_m)
        return [_causal_counts(shape, start, block_m, block_n) for start in starts]
    loaded, whole = key_spans(shape, block_m, block_n), whole_key_tiles(shape, block_m, block_n)
    visited = [max(1, -(-len(span) // block_n)) for span in loaded]
    return [(tiles, tiles - min(full, tiles)) for tiles, full in zip(visited, whole, strict=True)]


def _causal_counts(shape: AttentionShape, start: int, block_m: int, block_n: int) -> tuple[int, int]:
    """(visited, masked) key tiles of the query tile that starts at this row."""
    visited = max(1, -(-_seen(shape, start + block_m) // block_n))
    return visited, visited - _seen(shape, start + 1) // block_n


def _seen(shape: AttentionShape, queries: int) -> int:
    """Return how many keys the first `queries` queries of a causal shape see together."""
    return min(max(queries + shape.causal_offset, 0), shape.seqlen_k)

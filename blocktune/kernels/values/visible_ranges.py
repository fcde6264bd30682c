"""Which rows the blocks of a grid load: the tiles that causal mask and window leave, as spans of rows.

    key_spans(shape, 128, 64)       # for every tile of 128 queries, the keys that its block loads
    query_spans(shape, 64, 128)     # for every tile of 128 keys, the queries that its block loads

Tiles are loaded whole, but nothing past the end of a sequence is. These are the ranges of `tile_range` and `row_range`
of kernels/portable/forward/scores.py; `keys_loaded` of tuner/traffic/visited_tiles.py is for kernels that know no
window.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from blocktune.kernels.values.features import UNLIMITED
from blocktune.kernels.values.shape import AttentionShape, Causal


def key_spans(shape: AttentionShape, block_m: int, block_n: int) -> tuple[range, ...]:
    """Return, for every query tile of a head, the keys that its block loads: all tiles in which one of its queries sees
    a key.

    Args:
        shape: the problem; its mask tensor hides nothing here, since it is unknown before the tile is loaded.
        block_m: queries per tile.
        block_n: keys per tile.
    """
    left, right = _reach(shape)
    return _spans(shape.seqlen_q, block_m, shape.seqlen_k, block_n, shape.diagonal, (left, right))


def query_spans(shape: AttentionShape, block_m: int, block_n: int) -> tuple[range, ...]:
    """Return, for every key tile of a head, the queries that its block loads: all tiles in which a query sees one of
    its keys.

    Args:
        shape: the problem.
        block_m: queries per tile.
        block_n: keys per tile.
    """
    left, right = _reach(shape)
    return _spans(shape.seqlen_k, block_n, shape.seqlen_q, block_m, -shape.diagonal, (right, left))


def whole_key_tiles(shape: AttentionShape, block_m: int, block_n: int) -> tuple[int, ...]:
    """Return, for every query tile of a head, the key tiles of which all its queries see all keys, so that nothing is
    masked.

    Args:
        shape: the problem.
        block_m: queries per tile.
        block_n: keys per tile.
    """
    left, right = _reach(shape)
    counts = []
    for start in range(0, shape.seqlen_q, block_m):
        last = min(start + block_m, shape.seqlen_q) - 1
        low = 0 if left == UNLIMITED else max(0, last + shape.diagonal - left)
        high = shape.seqlen_k if right == UNLIMITED else min(shape.seqlen_k, start + shape.diagonal + right + 1)
        counts.append(max(0, high // block_n - -(-low // block_n)))
    return tuple(counts)


def rows_in(spans: Iterable[range]) -> int:
    """Return the rows that are loaded, each as often as it is in a span."""
    return sum(map(len, spans))


def pairs_in(spans: Sequence[range], block: int, length: int) -> int:
    """Return the number of (query, key) pairs of the visited tiles inside both sequences.

    The owner of span i has `block` rows from i * block on, as far as they are below `length`.
    """
    return sum(len(span) * min(block, length - number * block) for number, span in enumerate(spans))


def count_rows(spans: Sequence[range]) -> int:
    """Return how many different rows are among them."""
    covered = reached = 0
    for span in sorted((span for span in spans if span), key=lambda span: span.start):
        covered += max(0, span.stop - max(reached, span.start))
        reached = max(reached, span.stop)
    return covered


def _reach(shape: AttentionShape) -> tuple[int, int]:
    """Return (left, right) of the keys around the diagonal that a query sees; `UNLIMITED` on a side without bound."""
    left, right = shape.features.window or (UNLIMITED, UNLIMITED)
    return left, right if shape.causal is Causal.NONE else 0


@lru_cache(maxsize=64)  # the same ones are wanted for many configs of a shape
def _spans(owned: int, owner: int, walked: int, tile: int, diagonal: int, reach: tuple[int, int]) -> tuple[range, ...]:
    """Return, for every block of `owner` of the owned rows, the walked rows that it loads in tiles: row i reaches from
    i + diagonal - reach[0] to i + diagonal + reach[1]."""
    before, behind = reach
    spans = []
    for start in range(0, owned, owner):
        last = min(start + owner, owned) - 1
        low = 0 if before == UNLIMITED else start + diagonal - before
        high = walked if behind == UNLIMITED else last + diagonal + behind + 1
        spans.append(_whole_tiles(low, high, tile, walked))
    return tuple(spans)


def _whole_tiles(low: int, high: int, block: int, length: int) -> range:
    """Return the rows in the tiles from row `low`'s to row `high - 1`'s, inside the sequence. Where low is
    beyond the end, but in the last tile, the kernels still load that tile."""
    first, stop = max(low, 0) // block, -(-max(0, min(high, length)) // block)
    return range(first * block, max(first * block, min(stop * block, length)))

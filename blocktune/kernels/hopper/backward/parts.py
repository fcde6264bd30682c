"""In how many parts a group of query heads is walked along by default: those with which a launch ends first.

The multiprocessors take the tiles of keys in their order, each the next one as soon as it is free. Few long tiles leave
most of them idle at the end; many parts cost float32 gradients that a fourth launch adds up. On an H200 the choice was
within 1.3 % of the best one in 20 of 20 measured shapes, from which the constants come.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from heapq import heapreplace
from itertools import repeat

from blocktune.kernels.hopper.backward.layout import (
    BLOCK_M,
    bounds_of,
    goes_back,
    goes_both_ways,
    is_listed,
    is_wide,
    keys_of_block,
)
from blocktune.kernels.values.features import UNLIMITED
from blocktune.kernels.values.shape import AttentionShape, Causal

MULTIPROCESSORS = 132
"""Of an H100 or H200 on SXM."""
GROUP_BYTES = 32 << 20
"""Queries, their gradients and float32 dq of the heads that causal blocks work on together: a part of the L2 cache."""
MAX_HEADS = 32
"""The most of them. On an H200 64 heads of 512 keys were 1.9 % slower, and 128 heads 17 %."""
ORDERED_HEADS, ORDERED_WIDE_HEADS = 8, 2
"""Heads that tiles belong to in turns, at least, where walks go back in a fixed order of additions: tiles of one head
that begin together wait for one another."""
ORDERED_BYTES = 16 << 20
"""`GROUP_BYTES` of head_dim up to 128 there. On an H200 twice as much was up to 3.4 % slower; it was not compared
under block masks. Wide heads with half of GROUP_BYTES were up to 12 % slower, with twice as much up to 25 %."""
DIAGONAL_COLUMNS, DIAGONAL_HEADS = 128, 16
"""In a fixed order under a diagonal: columns that narrower heads count as, and the most heads. On an H200 twice as many
were up to 1.1 % slower at head_dim 64, and 3 to 36 % at 128 and 256."""
TILE_STEPS, PARTIAL_TILE_STEPS = 3, 5
"""What a tile costs besides its blocks of queries, in the time of one: of whole groups, and of parts, which are added
up afterwards."""
WIDE_TILE_STEPS = 2
"""Of heads wider than 128, whose parts leave gradients of 16 bits: of whole groups and of parts. On an H200 the choice
was within 0.1 % of the best one in 13 of 13 measured shapes, from which it comes."""
JOIN_STEPS = 2
"""Of the fourth launch."""
MAX_TILES = 8192
"""Tiles that keep all multiprocessors busy to the end, however long they are."""


def possible_parts(shape: AttentionShape, choices: Sequence[int]) -> list[int]:
    """Return the choices that a shape's groups can be walked along in."""
    features = shape.features
    if features.varlen and (features.deterministic or is_wide(shape)):
        return [1]
    if is_wide(shape) and (features.deterministic or is_listed(shape)):
        return [1]
    return [parts for parts in choices if shape.group_size % parts == 0]


@lru_cache(1024)
def default_parts(shape: AttentionShape, choices: tuple[int, ...]) -> int:
    """Return the number of parts with which the launch ends first, of those choices that are possible."""
    tiles = -(-shape.seqlen_k // keys_of_block(shape)) * shape.batch * shape.num_heads_kv
    few = [parts for parts in possible_parts(shape, choices) if parts == 1 or parts * tiles <= MAX_TILES]
    return few[0] if len(few) == 1 else min(few, key=lambda parts: _steps(shape, parts))


def heads_per_group(shape: AttentionShape, parts: int) -> int:
    """Return how many parts of key heads take their tiles in turns. Their queries, gradients and sums fill
    `GROUP_BYTES` or `ORDERED_BYTES`. They are `MAX_HEADS` or `DIAGONAL_HEADS` at most, more where walks go back, and
    their groups are of one size."""
    least, most, columns, group_bytes = 1, MAX_HEADS, shape.head_dim, GROUP_BYTES
    if goes_back(shape):
        least = ORDERED_WIDE_HEADS if is_wide(shape) else ORDERED_HEADS
        group_bytes = GROUP_BYTES if is_wide(shape) or is_listed(shape) else ORDERED_BYTES
    elif shape.features.deterministic:
        most, columns = DIAGONAL_HEADS, max(columns, DIAGONAL_COLUMNS)
    head_bytes = 8 * shape.seqlen_q * columns * shape.group_size // parts
    heads = shape.batch * shape.num_heads_kv * parts
    return _even_groups(heads, min(heads, max(least, min(most, group_bytes // head_bytes))))


def _even_groups(heads: int, most: int) -> int:
    """Return the heads of a group, `most` or fewer. A last group of few heads would begin its longest tiles when the
    other multiprocessors are about to end: the size divides the heads, unless that halves it, and is even else."""
    divisor = max(size for size in range(1, most + 1) if heads % size == 0)
    return divisor if 2 * divisor > most else -(-heads // -(-heads // most))


def _steps(shape: AttentionShape, parts: int) -> int:
    """Return when the last multiprocessor ends, in the time of one block of queries."""
    ends = [0] * MULTIPROCESSORS
    for steps in _tiles(shape, parts):
        heapreplace(ends, ends[0] + steps)
    return max(ends) + (JOIN_STEPS if parts > 1 else 0)


def _tiles(shape: AttentionShape, parts: int) -> Iterator[int]:
    """Yield what each tile takes, in the order in which they are taken (`locate`)."""
    heads, together = shape.batch * shape.num_heads_kv * parts, heads_per_group(shape, parts)
    walks = [blocks * (shape.group_size // parts) + _own_steps(shape, parts) for blocks in _walks(shape)]
    last_keys_first = shape.features.deterministic and not goes_back(shape)
    for begin in range(0, heads, together):
        walks_back = goes_both_ways(shape) and begin > 0 and begin + together >= heads
        for steps in reversed(walks) if last_keys_first and not walks_back else walks:
            for _ in range(min(together, heads - begin)):
                yield steps


def _own_steps(shape: AttentionShape, parts: int) -> int:
    """Return what a tile costs besides its blocks of queries."""
    if is_wide(shape):
        return WIDE_TILE_STEPS
    return PARTIAL_TILE_STEPS if parts > 1 else TILE_STEPS


def _walks(shape: AttentionShape) -> list[int]:
    """Return the blocks of queries that see each tile of keys, one at least."""
    (upper, lower), (left, right) = bounds_of(shape), shape.features.window or (UNLIMITED, UNLIMITED)
    end = -(-shape.seqlen_q // BLOCK_M)
    begins: Iterable[int] = repeat(0)
    ends: Iterable[int] = repeat(end)
    block_n = keys_of_block(shape)
    keys = range(0, shape.seqlen_k, block_n)
    if shape.causal is not Causal.NONE or right != UNLIMITED:
        begins = (max(key - upper, 0) // BLOCK_M for key in keys)
    if left != UNLIMITED:
        ends = (min(end, -(-max(key + block_n - lower, 0) // BLOCK_M)) for key in keys)
    return [max(1, last - first) for _, first, last in zip(keys, begins, ends, strict=False)]

"""How many bytes block-sparse attention moves: as the dense kernels, but only the blocks that the mask names.

    blocks = random_blocks(shape, density=0.25)
    sparse_forward_traffic(shape, 64, 64, blocks).total_bytes
    sparse_backward_traffic(shape, keys=(64, 64), queries=(64, 64), blocks=blocks).total_bytes

What follows the density are the keys and values that queries read, and the queries that keys read: Θ(Nd + N²d²s/M) of
Proposition 4 of the FlashAttention paper, with the density s. Queries, outputs and gradients are moved once, whatever
the mask.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.kernels.values.visible_ranges import count_rows, rows_in
from blocktune.tuner.traffic.backward import delta_pass, fused_around, keys_pass_of, queries_pass_of
from blocktune.tuner.traffic.launches import Pass, Passes, query_rows
from blocktune.tuner.traffic.model import STATISTIC_BYTES
from blocktune.tuner.traffic.visited_tiles import keys_loaded

if TYPE_CHECKING:
    from blocktune.kernels.values.block_mask import BlockMask

USUAL_BLOCK = 128
"""Queries and keys of a mask's block where the caller names none: those that shapes are tuned with."""
USUAL_DENSITY = 0.25

HeadBlocks = tuple[tuple[bool, ...], ...]
"""Of one head: for every block of queries, whether each block of keys takes part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A block mask without its tensor. by_head: [batch or 1][query heads or 1]."""

    block_q: int
    block_k: int
    by_head: tuple[tuple[HeadBlocks, ...], ...]

    @classmethod
    def of(cls, mask: "BlockMask") -> Self:
        """Return those of a mask; waits for its device."""
        by_head = tuple(tuple(tuple(map(tuple, cells)) for cells in heads) for heads in mask.mask.tolist())
        return cls(block_q=mask.block_q, block_k=mask.block_k, by_head=by_head)

    @property
    def density(self) -> float:
        """The share of active blocks."""
        cells = [cell for heads in self.by_head for head in heads for row in head for cell in row]
        return sum(cells) / len(cells)

    def of_head(self, batch: int, head: int) -> HeadBlocks:
        """Return the blocks of a batch entry and query head."""
        heads = self.by_head[batch if len(self.by_head) > 1 else 0]
        return heads[head if len(heads) > 1 else 0]


def random_blocks(shape: AttentionShape, *, density: float = USUAL_DENSITY, block: int = USUAL_BLOCK) -> Blocks:
    """Return one mask for all heads with equally many active blocks in every row of blocks, at least one."""
    dice = random.Random(0)
    rows, columns = -(-shape.seqlen_q // block), -(-shape.seqlen_k // block)
    chosen = (set(dice.sample(range(columns), max(1, round(density * columns)))) for _ in range(rows))
    active = tuple(tuple(column in row for column in range(columns)) for row in chosen)
    return Blocks(block_q=block, block_k=block, by_head=((active,),))


def sparse_forward_traffic(
    shape: AttentionShape, block_m: int, block_n: int, blocks: Blocks, *, perfect_l2: bool = False, lse: bool = False
) -> Passes:
    """Count the forward: queries and output once; keys and values of the active blocks of every query tile.

    Args:
        shape: the problem.
        block_m: queries per tile, a divisor of the mask's blocks.
        block_n: keys per tile, likewise.
        blocks: the mask.
        perfect_l2: L2 keeps a head's keys until the last query head of its group has read them.
        lse: the log-sum-exp of every row is written too.
    """
    walk = queries_pass_of(shape, _keys_walked(shape, block_m, block_n, blocks, perfect_l2))
    rows = query_rows(shape)
    written = {"o": rows * shape.head_dim_v * shape.element_bytes}
    written |= {"lse": rows * STATISTIC_BYTES} if lse else {}
    return Passes(passes=(Pass(name="forward", read={name: walk.read[name] for name in "qkv"}, written=written),))


def sparse_backward_traffic(
    shape: AttentionShape,
    *,
    keys: tuple[int, int],
    queries: tuple[int, int],
    blocks: Blocks,
    perfect_l2: bool = False,
) -> Passes:
    """Count the backward in two kernels, as `split_backward_traffic` has it.

    Args:
        shape: the problem.
        keys: (queries, keys) of a tile of the kernel whose blocks own keys.
        queries: (queries, keys) of a tile of the one whose blocks own queries.
        blocks: the mask.
        perfect_l2: rows that several blocks of a launch read come from memory once.
    """
    by_queries = queries_pass_of(shape, _keys_walked(shape, *queries, blocks, perfect_l2))
    by_keys = keys_pass_of(shape, _queries_walked(shape, *keys, blocks, perfect_l2))
    return Passes(passes=(delta_pass(shape), by_queries, by_keys))


def fused_sparse_backward_traffic(
    shape: AttentionShape,
    block_m: int,
    block_n: int,
    *,
    blocks: Blocks,
    perfect_l2: bool = False,
    own_lse: bool = False,
    parts: int = 1,
) -> Passes:
    """Count one kernel that adds up dq in memory, as `fused_backward_traffic` has it, under a mask."""
    walk = keys_pass_of(shape, _queries_walked(shape, block_m, block_n, blocks, perfect_l2))
    return fused_around(shape, walk, perfect_l2=perfect_l2, own_lse=own_lse, parts=parts)


def _keys_walked(shape: AttentionShape, block_m: int, block_n: int, blocks: Blocks, perfect_l2: bool) -> int:
    """Return the rows of keys that all blocks of queries load together; with perfect_l2, different ones."""
    ends = keys_loaded(shape, block_m, block_n)  # where the causal mask ends each tile's walk

    def of_head(batch: int, head: int) -> list[range]:
        return list(_key_spans(blocks.of_head(batch, head), blocks, ends, block_m))

    return _walk_rows(shape, blocks, perfect_l2, of_head, shape.group_size)


def _queries_walked(shape: AttentionShape, block_m: int, block_n: int, blocks: Blocks, perfect_l2: bool) -> int:
    """Return the rows of queries that all blocks of keys load together; with perfect_l2, different ones."""

    def of_head(batch: int, head: int) -> list[range]:
        return list(_query_spans(shape, blocks.of_head(batch, head), blocks, block_m, block_n))

    return _walk_rows(shape, blocks, perfect_l2, of_head, 1)


def _walk_rows(
    shape: AttentionShape, blocks: Blocks, perfect_l2: bool, of_head: Callable[[int, int], list[range]], sharing: int
) -> int:
    """Return the rows in the spans of all heads; with perfect_l2 the different ones of every `sharing` heads that read
    the same. A mask for all heads or entries is walked once."""
    batches, heads = len(blocks.by_head), len(blocks.by_head[0])
    total = 0
    for batch in range(batches):
        spans = [of_head(batch, head) for head in range(heads)]
        if not perfect_l2:
            total += sum(map(rows_in, spans)) * (shape.num_heads // heads)
            continue
        shared = spans * (shape.num_heads // heads)
        total += sum(
            count_rows([span for head in shared[first : first + sharing] for span in head])
            for first in range(0, shape.num_heads, sharing)
        )
    return total * (shape.batch // batches)


def _key_spans(head_blocks: HeadBlocks, blocks: Blocks, ends: Sequence[int], block_m: int) -> Iterator[range]:
    """Yield the keys that the query tiles of a head load, block by block."""
    for tile, end in enumerate(ends):
        for column, active in enumerate(head_blocks[tile * block_m // blocks.block_q]):
            if active:
                yield range(column * blocks.block_k, min((column + 1) * blocks.block_k, end))


def _query_spans(
    shape: AttentionShape, head_blocks: HeadBlocks, blocks: Blocks, block_m: int, block_n: int
) -> Iterator[range]:
    """Yield the queries that the key tiles of a head load, block by block."""
    for key in range(0, shape.seqlen_k, block_n):
        first = 0 if shape.causal is Causal.NONE else max(0, key - shape.causal_offset) // block_m * block_m
        for row, cells in enumerate(head_blocks):
            if cells[key // blocks.block_k]:
                start = max(row * blocks.block_q, first)
                yield range(start, min((row + 1) * blocks.block_q, shape.seqlen_q))

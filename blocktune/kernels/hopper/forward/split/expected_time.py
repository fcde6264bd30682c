"""The number of parts that takes the least time, by tiles, waves and what a merge takes."""

from blocktune.kernels.hardware.limits import MULTIPROCESSORS
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal

SPLITS = (2, 3, 4, 5, 6, 8, 12, 16)
"""Numbers of parts that are searched."""
PRODUCTS_PER_US = 2.4e6
"""Multiply-adds of a multiprocessor in a microsecond. By this and the next constants `expected_us` gives the ratio
of one part over several within 15 % (root mean square) for 28 shapes on an H200
(results/h200.split-forward.table.json)."""
EDGE_US, MERGE_US = 4.0, 4.0
"""Microseconds that beginning and end of a tile take, and the launch of the merge."""
MERGED_BYTES_PER_US = 2e6


def best_splits(shape: AttentionShape, tile: KernelConfig) -> int:
    """Return the number of parts that is expected to take the least time with tiles like this."""
    blocks = -(-shape.seqlen_k // tile.block_n)
    return min((splits for splits in SPLITS if splits <= blocks), key=lambda splits: expected_us(shape, tile, splits))


def gain_of(shape: AttentionShape, tile: KernelConfig) -> float:
    """Return the expected time of one part over that of the best number of parts."""
    return expected_us(shape, tile, 1) / expected_us(shape, tile, best_splits(shape, tile))


def expected_us(shape: AttentionShape, tile: KernelConfig, splits: int) -> float:
    """Return the time until the last multiprocessor ends, and that of the merge.

    Tiles of one length end in waves. Of tiles from none to the longest, which are taken first, the short ones fill
    what the long ones leave.
    """
    step_us = tile.block_m * tile.block_n * (shape.head_dim + shape.head_dim_v) / PRODUCTS_PER_US
    longest, shortest = (_blocks_of_tile(shape, tile, end) for end in (shape.seqlen_q, tile.block_m))
    tiles = tiles_of(shape, tile) * splits
    mean_us = shape.visible_pairs / shape.seqlen_q / tile.block_n / splits * step_us + EDGE_US
    alike = shortest / longest
    in_waves, in_turn = -(-tiles // MULTIPROCESSORS), tiles / MULTIPROCESSORS
    attend_us = max((alike * in_waves + (1.0 - alike) * in_turn) * mean_us, longest / splits * step_us + EDGE_US)
    return attend_us + (_merge_us(shape, splits) if splits > 1 else 0.0)


def _merge_us(shape: AttentionShape, splits: int) -> float:
    out_bytes = shape.batch * shape.num_heads * shape.seqlen_q * shape.head_dim_v * shape.element_bytes
    return MERGE_US + (splits + 1) * out_bytes / MERGED_BYTES_PER_US


def tiles_of(shape: AttentionShape, tile: KernelConfig) -> int:
    """Return how many tiles of queries there are."""
    return -(-shape.seqlen_q // tile.block_m) * shape.batch * shape.num_heads


def _blocks_of_tile(shape: AttentionShape, tile: KernelConfig, end: int) -> float:
    """Return the blocks of keys of a tile whose queries end at `end`, at least one and at most those of the last."""
    keys = shape.seqlen_k
    if shape.causal is not Causal.NONE:
        keys = min(keys, min(end, shape.seqlen_q) + shape.diagonal)
    return max(1.0, keys / tile.block_n)

"""How many bytes split-KV decoding moves: keys and values once for each tile of packed rows, and the partial results.

    decode_traffic(shape, config)["split"].read["k"]
    decode_traffic(shape, config)["merge"].read_bytes       # bytes that the splits add

All query heads of a key head are rows of one tile, so that a group reads its keys once. Every split reads the queries
again and leaves an output, a maximum and a sum in float32 for each row, which a second launch or the last block merges.
A cache is counted as full; a paged one moves the same bytes, whole keys being contiguous in a page.
"""

from blocktune.kernels.portable.decode.launch import is_paired, merge_arguments
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import UNLIMITED
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.traffic.launches import Pass, Passes, query_rows
from blocktune.tuner.traffic.model import STATISTIC_BYTES

PARTIAL_BYTES = 4
"""Of one element of a split's output: float32."""

SCALE_BYTES = 4
"""Of the scale that a key of an 8-bit cache may have of its own, and its value another."""


def decode_traffic(
    shape: AttentionShape, config: KernelConfig, *, perfect_l2: bool = False, lse: bool = False
) -> Passes:
    """Count the launches of `flash_decode`: `split`, and `merge` if there is more than one split and no pair, of which
    one program reads what the other wrote.

    Args:
        shape: the problem.
        config: its block_m rows of a group and block_n keys per tile, and its splits.
        perfect_l2: L2 keeps a head's keys until its last tile of rows has read them, queries until the last split has,
            and a row's statistics until the last part of the merge has.
        lse: the log-sum-exp of every row is written too.
    """
    read, result, shares = _inputs(shape, config, perfect_l2), _results(shape, lse), _shares(shape, config)
    if not shares:
        return Passes(passes=(Pass(name="split", read=read, written=result),))
    if is_paired(config):
        half = {name: count // 2 for name, count in shares.items()}
        return Passes(passes=(Pass(name="split", read=read | half, written=result | half),))
    parts = 1 if perfect_l2 else -(-shape.head_dim_v // merge_arguments(config, shape)["BLOCK_D"])
    merged = shares | {"statistics": parts * shares["statistics"]}
    return Passes(
        passes=(
            Pass(name="split", read=read, written=shares),
            Pass(name="merge", read=merged, written=result),
        )
    )


def single_launch_traffic(
    shape: AttentionShape, config: KernelConfig, *, perfect_l2: bool = False, lse: bool = False
) -> Passes:
    """Count the one launch of `flash_decode_hopper`, whose last blocks read what the others wrote; arguments as
    above."""
    read, shares = _inputs(shape, config, perfect_l2), _shares(shape, config)
    return Passes(passes=(Pass(name="decode", read=read | shares, written=_results(shape, lse) | shares),))


def _inputs(shape: AttentionShape, config: KernelConfig, perfect_l2: bool) -> dict[str, int]:
    splits, rows = config.parameters["splits"], query_rows(shape)
    row_tiles = 1 if perfect_l2 else -(-shape.group_size * shape.seqlen_q // config.block_m)
    keys = shape.batch * shape.num_heads_kv * row_tiles * keys_in_reach(shape, config.block_n)
    scale = SCALE_BYTES if shape.features.token_scales else 0
    return {
        "q": rows * shape.head_dim * shape.element_bytes * (1 if perfect_l2 else splits),
        "k": keys * (shape.head_dim * shape.kv_bytes + scale),
        "v": keys * (shape.head_dim_v * shape.kv_bytes + scale),
    }


def _results(shape: AttentionShape, lse: bool) -> dict[str, int]:
    rows = query_rows(shape)
    return {"o": rows * shape.head_dim_v * shape.element_bytes} | ({"lse": rows * STATISTIC_BYTES} if lse else {})


def _shares(shape: AttentionShape, config: KernelConfig) -> dict[str, int]:
    """Return what all splits leave to be merged; nothing if there is one."""
    splits, rows = config.parameters["splits"], query_rows(shape)
    if splits == 1:
        return {}
    return {
        "partial": splits * rows * shape.head_dim_v * PARTIAL_BYTES,
        "statistics": splits * rows * 2 * STATISTIC_BYTES,
    }


def keys_in_reach(shape: AttentionShape, block_n: int) -> int:
    """Return the keys that all splits of one tile load together, for a key head: from the first tile that the
    first query's window reaches to the last key that the last query sees."""
    left, right = shape.features.window or (UNLIMITED, UNLIMITED)
    if shape.causal is not Causal.NONE:
        right = 0
    first = 0 if left == UNLIMITED else max(0, shape.diagonal - left)
    stop = shape.seqlen_k if right == UNLIMITED else min(shape.seqlen_k, shape.seqlen_q + shape.diagonal + right)
    return max(0, stop - first // block_n * block_n)

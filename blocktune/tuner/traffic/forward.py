"""How many bytes the forward kernels move that are more than FlashAttention-2 in one launch.

general_traffic(shape, 128, 64)         # window, mask tensor
transposed_traffic(shape, general_traffic(shape, 128, 64), "k")     # keys transposed by a launch of their own
v1_kernel_traffic(shape, 64, 64)        # v1, and its float32 output turned into 16 bits
"""

from dataclasses import replace
from typing import Literal

from blocktune.kernels.values.shape import AttentionShape
from blocktune.kernels.values.visible_ranges import count_rows, key_spans, pairs_in, rows_in
from blocktune.tuner.traffic.launches import (
    Pass,
    Passes,
    key_rows,
    mask_bits,
    mask_pass,
    mask_traffic,
    query_rows,
    with_mask,
)
from blocktune.tuner.traffic.model import STATISTIC_BYTES, V2Traffic, v1_traffic

ACCUMULATOR_BYTES = 4
"""Of an element of v1's output between its updates: float32."""


def general_traffic(
    shape: AttentionShape, block_m: int, block_n: int, *, perfect_l2: bool = False, lse: bool = False
) -> Passes:
    """Count FlashAttention-2 with features. A window leaves keys unread, a mask tensor is read in every tile that is
    visited. Soft cap, ALiBi and dropout move nothing: dropped pairs are made again from a seed. Packed sequences are
    counted as if all were the longest.

    Args:
        shape: the problem.
        block_m: queries per tile.
        block_n: keys per tile.
        perfect_l2: L2 keeps a head's keys until the last query head of its group has read them, and the mask until the
            last head of all.
        lse: the log-sum-exp of every row is written too.
    """
    spans = key_spans(shape, block_m, block_n)
    by_group, by_tile = shape.num_heads_kv * count_rows(spans), shape.num_heads * rows_in(spans)
    keys = shape.batch * (by_group if perfect_l2 else by_tile)
    rows = query_rows(shape)
    pairs = pairs_in(spans, block_m, shape.seqlen_q)
    read = {
        "q": rows * shape.head_dim * shape.element_bytes,
        "k": keys * shape.head_dim * shape.element_bytes,
        "v": keys * shape.head_dim_v * shape.element_bytes,
    }
    written = {"o": rows * shape.head_dim_v * shape.element_bytes}
    written |= {"lse": rows * STATISTIC_BYTES} if lse else {}
    mask = mask_traffic(shape, pairs, perfect_l2=perfect_l2)
    return Passes(passes=(Pass(name="forward", read=with_mask(read, mask), written=written),))


def transposed_traffic(shape: AttentionShape, forward: V2Traffic | Passes, tensor: Literal["k", "v"]) -> Passes:
    """Return the traffic of a forward over keys or values that a launch before has transposed: it reads and writes all
    of them once.

    Args:
        shape: the problem.
        forward: the traffic of the forward alone.
        tensor: what is transposed.
    """
    moved = key_rows(shape) * (shape.head_dim if tensor == "k" else shape.head_dim_v) * shape.element_bytes
    (then,) = forward.passes if isinstance(forward, Passes) else (_as_pass(forward),)
    read = {f"{tensor}t" if name == tensor else name: count for name, count in then.read.items()}
    return Passes(
        passes=(
            Pass(name="transpose", read={tensor: moved}, written={f"{tensor}t": moved}),
            replace(then, read=read),
        )
    )


def laid_mask_traffic(
    shape: AttentionShape, forward: V2Traffic | Passes, block_m: int, block_n: int, *, perfect_l2: bool = False
) -> Passes:
    """Return the traffic of a forward that reads a mask which a launch before has laid out: a boolean one as bits, an
    additive one in its own type.

    Args:
        shape: the problem.
        forward: the traffic of the forward without its mask.
        block_m: queries per tile.
        block_n: keys per tile.
        perfect_l2: as of `general_traffic`.
    """
    visited = pairs_in(key_spans(shape, block_m, block_n), block_m, shape.seqlen_q)
    seen = mask_traffic(shape, visited, perfect_l2=perfect_l2)
    (then,) = forward.passes if isinstance(forward, Passes) else (_as_pass(forward),)
    return Passes(passes=(mask_pass(shape), replace(then, read={**then.read, "laid": seen // mask_bits(shape)})))


def merged_traffic(shape: AttentionShape, forward: V2Traffic | Passes, splits: int) -> Passes:
    """Return the traffic of a forward over parts of the keys, which read the queries each, and of the merge of what
    they leave: an output of its type and a log-sum-exp for every row of a part.

    Args:
        shape: the problem.
        forward: the traffic of the forward in one part.
        splits: the parts.
    """
    (then,) = forward.passes if isinstance(forward, Passes) else (_as_pass(forward),)
    rows = query_rows(shape)
    out_bytes = rows * shape.head_dim_v * shape.element_bytes
    left = {"partial": splits * out_bytes, "statistics": splits * rows * STATISTIC_BYTES}
    read = {**then.read, "q": splits * then.read["q"]}
    return Passes(
        passes=(replace(then, read=read, written=left), Pass(name="merge", read=left, written={"o": out_bytes}))
    )


def _as_pass(traffic: V2Traffic) -> Pass:
    """Return FlashAttention-2 without log-sum-exp as a launch."""
    read = {"q": traffic.q_read, "k": traffic.k_read, "v": traffic.v_read}
    return Pass(name="forward", read=read, written={"o": traffic.o_written})


def v1_kernel_traffic(shape: AttentionShape, block_m: int, block_n: int) -> Passes:
    """Count algorithm 1, and what the paper leaves to the caller: a 16-bit output is made from the float32 one at the
    end, by the same launch. No cache changes it much: every pass writes the output again."""
    found = v1_traffic(shape, block_m, block_n)
    elements = query_rows(shape) * shape.head_dim_v
    short = shape.element_bytes != ACCUMULATOR_BYTES
    read = {"k": found.k_read, "v": found.v_read, "q": found.q_read, "statistics": found.statistics_read}
    written = {"initial": found.initial_written, "statistics": found.statistics_written}
    read["accumulator"] = found.o_read + (elements * ACCUMULATOR_BYTES if short else 0)
    written["accumulator"] = found.o_written
    written |= {"o": elements * shape.element_bytes} if short else {}
    return Passes(passes=(Pass(name="forward", read=read, written=written),))

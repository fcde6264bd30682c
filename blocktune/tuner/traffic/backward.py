"""How many bytes the backward moves, counted launch by launch: standard attention's, two kernels', and one's.

    standard_backward_traffic(shape).total_bytes           # seven trips of a matrix of the size of the scores
    split_backward_traffic(shape, keys=(64, 128), queries=(128, 64)).total_bytes
    fused_backward_traffic(shape, 64, 128).total_bytes     # dq is summed in memory, once per key tile

The counts are those of Theorem 5 of the FlashAttention paper (Dao et al., arXiv 2205.14135) with their constants:
Θ(Nd + N²) accesses in standard attention, Θ(N²d²/M) by tiles. `perfect_l2` is what is left if, in every launch, L2
keeps what several of its blocks read or add to.
"""

from dataclasses import replace

from blocktune.kernels.values.shape import AttentionShape
from blocktune.kernels.values.visible_ranges import count_rows, key_spans, pairs_in, query_spans, rows_in
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
from blocktune.tuner.traffic.model import STATISTIC_BYTES, score_matrix_bytes

SUM_BYTES = 4
"""Of an element of dq while it is summed in memory: float32."""


def standard_backward_traffic(shape: AttentionShape) -> Passes:
    """Count algorithm 3 of the paper: the probabilities are kept from the forward, and every product is a launch; dp
    and ds are matrices of the size of the scores too."""
    heads = shape.batch * shape.num_heads
    scores = heads * score_matrix_bytes(shape)
    q, out, k, v = (  # every query head reads the keys of its group again
        heads * length * dim * shape.element_bytes
        for length, dim in (
            (shape.seqlen_q, shape.head_dim),
            (shape.seqlen_q, shape.head_dim_v),
            (shape.seqlen_k, shape.head_dim),
            (shape.seqlen_k, shape.head_dim_v),
        )
    )
    group = shape.group_size
    return Passes(
        passes=(
            Pass(name="dv", read={"p": scores, "dout": out}, written={"dv": v // group}),
            Pass(name="dp", read={"dout": out, "v": v}, written={"dp": scores}),
            Pass(name="ds", read={"p": scores, "dp": scores}, written={"ds": scores}),
            Pass(name="dq", read={"ds": scores, "k": k}, written={"dq": q}),
            Pass(name="dk", read={"ds": scores, "q": q}, written={"dk": k // group}),
        )
    )


def split_backward_traffic(
    shape: AttentionShape, *, keys: tuple[int, int], queries: tuple[int, int], perfect_l2: bool = False
) -> Passes:
    """Count row sums first, then one kernel whose blocks own keys, for dk and dv, and one whose blocks own queries, for
    dq.

    Args:
        shape: the problem, with its window and mask tensor, if any.
        keys: (queries, keys) of a tile of the first kernel.
        queries: (queries, keys) of a tile of the second one.
        perfect_l2: rows that several blocks of a launch read come from memory once.
    """
    walk = keys_pass(shape, *keys, perfect_l2=perfect_l2)
    return Passes(passes=(delta_pass(shape), walk, queries_pass(shape, *queries, perfect_l2=perfect_l2)))


def fused_backward_traffic(
    shape: AttentionShape,
    block_m: int,
    block_n: int,
    *,
    perfect_l2: bool = False,
    own_lse: bool = False,
    parts: int = 1,
) -> Passes:
    """Count one kernel whose blocks own keys and add their parts of dq to float32 sums in memory, which start as zeros
    and become dq at the end. The zeros are counted with the row sums, whether or not a launch of their own writes them.

    Args:
        shape: the problem, with its window and mask tensor, if any.
        block_m: queries per tile.
        block_n: keys per tile.
        perfect_l2: rows that several blocks of a launch read, or add to, come from memory once.
        own_lse: the launch before also writes the log-sum-exp in a form of its own.
        parts: in how many parts a group of query heads is walked along; see `_split_parts`.
    """
    walk = keys_pass(shape, block_m, block_n, perfect_l2=perfect_l2)
    return fused_around(shape, walk, perfect_l2=perfect_l2, own_lse=own_lse, parts=parts)


def fused_around(shape: AttentionShape, walk: Pass, *, perfect_l2: bool, own_lse: bool, parts: int) -> Passes:
    """Return all launches of `fused_backward_traffic`, whose blocks of keys walk like this."""
    before = delta_pass(shape)
    sums = query_rows(shape) * shape.head_dim * SUM_BYTES
    added = walk.read["q"] // shape.element_bytes * SUM_BYTES
    lse = {"lse": query_rows(shape) * STATISTIC_BYTES} if own_lse else {}
    walk, *join = _split_parts(shape, walk, parts, perfect_l2)
    return Passes(
        passes=(
            Pass(name="delta", read={**before.read, **lse}, written={**before.written, **lse, "sums": sums}),
            replace(walk, added={"sums": added}),
            Pass(name="dq", read={"sums": sums}, written={"dq": sums // SUM_BYTES * shape.element_bytes}),
            *join,
        )
    )


def with_mask_laid_out(shape: AttentionShape, found: Passes) -> Passes:
    """Return the traffic of a backward whose pass over keys reads the mask as a launch before has laid it out."""
    before, walk, *after = found.passes
    read = {name: count for name, count in walk.read.items() if name != "mask"}
    walk = replace(walk, read=read | {"laid": walk.read["mask"] // mask_bits(shape)})
    return Passes(passes=(before, mask_pass(shape), walk, *after))


def _split_parts(shape: AttentionShape, walk: Pass, parts: int, perfect_l2: bool) -> tuple[Pass, ...]:
    """Return the pass over keys by parts of each group, and what adds up the float32 gradients that the parts leave."""
    if parts == 1:
        return (walk,)
    readers = 1 if perfect_l2 else parts
    sums = {name: written // shape.element_bytes * SUM_BYTES * parts for name, written in walk.written.items()}
    read = {name: count * (readers if name in ("k", "v") else 1) for name, count in walk.read.items()}
    return replace(walk, read=read, written=sums), Pass(name="join", read=sums, written=walk.written)


def delta_pass(shape: AttentionShape) -> Pass:
    """Count delta = rowsum(dout * out) of every query."""
    outputs = query_rows(shape) * shape.head_dim_v * shape.element_bytes
    return Pass(
        name="delta",
        read={"out": outputs, "dout": outputs},
        written={"delta": query_rows(shape) * STATISTIC_BYTES},
    )


def keys_pass(shape: AttentionShape, block_m: int, block_n: int, *, perfect_l2: bool = False) -> Pass:
    """Count blocks of block_n keys of a key head, which walk the queries of every query head of the group that see
    them."""
    spans = query_spans(shape, block_m, block_n)
    walked = shape.batch * shape.num_heads * (count_rows(spans) if perfect_l2 else rows_in(spans))
    pairs = pairs_in(spans, block_n, shape.seqlen_k)
    return keys_pass_of(shape, walked, mask_bytes=mask_traffic(shape, pairs, perfect_l2=perfect_l2))


def keys_pass_of(shape: AttentionShape, walked: int, *, mask_bytes: int = 0) -> Pass:
    """Return the pass whose blocks own keys, when they walk `walked` rows of queries together."""
    rows = key_rows(shape)
    k, v = rows * shape.head_dim * shape.element_bytes, rows * shape.head_dim_v * shape.element_bytes
    read = {
        "k": k,
        "v": v,
        "q": walked * shape.head_dim * shape.element_bytes,
        "dout": walked * shape.head_dim_v * shape.element_bytes,
        "lse": walked * STATISTIC_BYTES,
        "delta": walked * STATISTIC_BYTES,
    }
    return Pass(name="dk_dv", read=with_mask(read, mask_bytes), written={"dk": k, "dv": v})


def queries_pass(shape: AttentionShape, block_m: int, block_n: int, *, perfect_l2: bool = False) -> Pass:
    """Count blocks of block_m queries of a query head, which walk the keys that they see."""
    spans = key_spans(shape, block_m, block_n)
    by_group, by_tile = shape.num_heads_kv * count_rows(spans), shape.num_heads * rows_in(spans)
    pairs = pairs_in(spans, block_m, shape.seqlen_q)
    walked = shape.batch * (by_group if perfect_l2 else by_tile)
    return queries_pass_of(shape, walked, mask_bytes=mask_traffic(shape, pairs, perfect_l2=perfect_l2))


def queries_pass_of(shape: AttentionShape, walked: int, *, mask_bytes: int = 0) -> Pass:
    """Return the pass whose blocks own queries, when they walk `walked` rows of keys together."""
    rows = query_rows(shape)
    q = rows * shape.head_dim * shape.element_bytes
    read = {
        "q": q,
        "dout": rows * shape.head_dim_v * shape.element_bytes,
        "lse": rows * STATISTIC_BYTES,
        "delta": rows * STATISTIC_BYTES,
        "k": walked * shape.head_dim * shape.element_bytes,
        "v": walked * shape.head_dim_v * shape.element_bytes,
    }
    return Pass(name="dq", read=with_mask(read, mask_bytes), written={"dq": q})

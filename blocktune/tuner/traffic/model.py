"""How many bytes three algorithms of attention move between device memory and the chip, counted, not estimated.

    standard_traffic(shape).total_bytes            # scores and probabilities make the round trip
    v1_traffic(shape, 64, 64).total_bytes          # keys outside: the output makes it, once per key tile
    v2_traffic(shape, 128, 64).total_bytes         # queries outside: keys are read once per query tile
    v2_traffic(shape, 128, 64, perfect_l2=True)    # what is left if L2 keeps every key

The counts are those of Theorem 2 of the FlashAttention paper (Dao et al., arXiv 2205.14135) with their constants: N
queries and keys, head dimension d and M elements on the chip need Θ(Nd + N²) accesses in standard attention and
Θ(N²d²/M) in FlashAttention, where tiles of Θ(M/d) keys make Θ(Nd/M) passes over Nd elements. The theorem knows no L2
cache. Keys that the neighbours just read are mostly found there, so what a GPU moves lies between the last two counts.
"""

from dataclasses import dataclass, fields
from typing import Any

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.traffic.visited_tiles import keys_loaded

SCORE_BYTES = 4
"""Of one score or probability of standard attention: float32."""

STATISTIC_BYTES = 4
"""Of one row's maximum, sum or log-sum-exp: float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes between device memory and the chip; a subclass names them by tensor, ending in `_read` or `_written`."""

    def to_json(self) -> dict[str, Any]:
        """Return every tensor's bytes, and their sum."""
        return self._fields_ending_in("") | {"total_bytes": self.total_bytes}

    @property
    def read_bytes(self) -> int:
        return sum(self._fields_ending_in("_read").values())

    @property
    def written_bytes(self) -> int:
        return sum(self._fields_ending_in("_written").values())

    @property
    def arriving_bytes(self) -> int:
        """What enters the multiprocessors: all that is read, unless something is added to memory."""
        return self.read_bytes

    @property
    def total_bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    def _fields_ending_in(self, ending: str) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith(ending)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardTraffic(Traffic):
    """Standard attention: S = Q Kᵀ, P = softmax(S) and O = P V one after another, with S and P in device memory."""

    q_read: int
    k_read: int
    s_written: int
    s_read: int
    p_written: int
    p_read: int
    v_read: int
    o_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class V1Traffic(Traffic):
    """FlashAttention, Algorithm 1: key tiles outside, query tiles inside; output and row statistics (maximum and sum)
    in device memory. initial_written: their first values, of line 2 of the algorithm."""

    initial_written: int
    k_read: int
    v_read: int
    q_read: int
    o_read: int
    o_written: int
    statistics_read: int
    statistics_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class V2Traffic(Traffic):
    """FlashAttention-2, and this package's forward kernels: query tiles outside, everything else on the chip."""

    q_read: int
    k_read: int
    v_read: int
    o_written: int
    lse_written: int


def standard_traffic(shape: AttentionShape) -> StandardTraffic:
    """Return the traffic of standard attention, which computes all pairs, causal or not.

    Every query head reads its keys and values again.
    """
    heads = shape.batch * shape.num_heads
    scores = heads * score_matrix_bytes(shape)
    return StandardTraffic(
        q_read=_queries(shape, shape.head_dim),
        k_read=heads * shape.seqlen_k * shape.head_dim * shape.element_bytes,
        s_written=scores,
        s_read=scores,
        p_written=scores,
        p_read=scores,
        v_read=heads * shape.seqlen_k * shape.head_dim_v * shape.element_bytes,
        o_written=output_bytes(shape),
    )


def v1_traffic(shape: AttentionShape, block_m: int, block_n: int, *, output_bytes: int = 4) -> V1Traffic:
    """Count FlashAttention's first algorithm, one block a query head; key tiles that a query tile cannot see are
    skipped.

    Args:
        shape: the problem.
        block_m: queries per tile, Br of the paper.
        block_n: keys per tile, Bc of the paper.
        output_bytes: of one element of the output between its updates: it is accumulated there, so float32.
    """
    heads, rows = shape.batch * shape.num_heads, shape.batch * shape.num_heads * shape.seqlen_q
    loaded = keys_loaded(shape, block_m, block_n)
    updates = heads * sum(  # rows of the output that are updated, each once per key tile
        -(-keys // block_n) * min(block_m, shape.seqlen_q - tile * block_m) for tile, keys in enumerate(loaded)
    )
    keys = heads * max(loaded)
    return V1Traffic(
        initial_written=rows * (shape.head_dim_v * output_bytes + 2 * STATISTIC_BYTES),
        k_read=keys * shape.head_dim * shape.element_bytes,
        v_read=keys * shape.head_dim_v * shape.element_bytes,
        q_read=updates * shape.head_dim * shape.element_bytes,
        o_read=updates * shape.head_dim_v * output_bytes,
        o_written=updates * shape.head_dim_v * output_bytes,
        statistics_read=updates * 2 * STATISTIC_BYTES,
        statistics_written=updates * 2 * STATISTIC_BYTES,
    )


def v2_traffic(
    shape: AttentionShape, block_m: int, block_n: int, *, perfect_l2: bool = False, lse: bool = False
) -> V2Traffic:
    """Count FlashAttention-2: queries and output once; keys and values once for every query tile that sees them.

    Args:
        shape: the problem.
        block_m: queries per tile.
        block_n: keys per tile.
        perfect_l2: L2 keeps a head's keys until the last query head of its group has read them, so that they come from
            device memory once.
        lse: the log-sum-exp of every row is written too.
    """
    loaded = keys_loaded(shape, block_m, block_n)
    by_group, by_tile = shape.num_heads_kv * max(loaded), shape.num_heads * sum(loaded)
    keys = shape.batch * (by_group if perfect_l2 else by_tile)
    return V2Traffic(
        q_read=_queries(shape, shape.head_dim),
        k_read=keys * shape.head_dim * shape.element_bytes,
        v_read=keys * shape.head_dim_v * shape.element_bytes,
        o_written=output_bytes(shape),
        lse_written=shape.batch * shape.num_heads * shape.seqlen_q * STATISTIC_BYTES if lse else 0,
    )


def score_matrix_bytes(shape: AttentionShape) -> int:
    """Return the bytes of the score matrix of one head in float32: 4 n² where queries and keys are n."""
    return shape.seqlen_q * shape.seqlen_k * SCORE_BYTES


def standard_memory_bytes(shape: AttentionShape) -> int:
    """Return the least device memory of standard attention: its tensors and one float32 matrix for the scores of all
    heads, which the probabilities replace. A softmax that is not in place needs two, and so does a backward: the
    probabilities and their gradients."""
    matrices = 2 if shape.direction is Direction.BACKWARD else 1
    return shape.tensor_bytes + matrices * shape.batch * shape.num_heads * score_matrix_bytes(shape)


def standard_memory_problem(shape: AttentionShape, device: DeviceSpec) -> str | None:
    """Return why standard attention of this shape does not fit this device; None if it fits or the memory is
    unknown."""
    needed, has = standard_memory_bytes(shape), device.memory_bytes
    if has is None or needed <= has:
        return None
    each = _size(score_matrix_bytes(shape))
    return (
        f"The scores of standard attention do not fit: they take {each} per head and {_size(needed)} in all with the "
        f"other tensors, but {device.name} has {_size(has)}. Take fewer heads, a smaller batch or a shorter sequence."
    )


def output_bytes(shape: AttentionShape) -> int:
    """Return the bytes of the output [batch, num_heads, seqlen_q, head_dim_v]."""
    return shape.batch * shape.num_heads * shape.seqlen_q * shape.head_dim_v * shape.out_bytes


def _queries(shape: AttentionShape, head_dim: int) -> int:
    """Return the bytes of a [batch, num_heads, seqlen_q, head_dim] tensor."""
    return shape.batch * shape.num_heads * shape.seqlen_q * head_dim * shape.element_bytes


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:,.3g} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:,.3g} MiB"

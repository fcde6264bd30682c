"""The fewest bytes of device memory that any algorithm moves: what no kernel can do without.

    least_bytes(shape)                            # inputs that a visible pair needs once, and outputs once

Proposition 3 of the FlashAttention paper (Dao et al., arXiv 2205.14135): no algorithm for exact attention gets by with
o(N²d²/M) accesses for every size M of on-chip memory from d to Nd. The proof takes M = Θ(Nd), where these are Θ(Nd):
the inputs and outputs, which every algorithm reads and writes. Here they are counted, so that the bound has a constant.
"""

from dataclasses import replace

from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.kernels.values.visible_ranges import key_spans, query_spans
from blocktune.tuner.traffic.launches import query_rows
from blocktune.tuner.traffic.model import output_bytes
from blocktune.tuner.traffic.sparse import random_blocks, sparse_forward_traffic

SMALLEST_TILE = 16
"""Of the kernels that walk a block mask."""


def least_bytes(shape: AttentionShape) -> int:
    """Return the bytes that every algorithm moves for a shape. A block mask is the one that traffic is counted with,
    other mask tensors are left out, and lengths of packed sequences and caches are the longest."""
    written = _gradients_out(shape) if shape.direction is Direction.BACKWARD else output_bytes(shape)
    return _queries_in(shape) + _keys_in(shape) + written


def _queries_in(shape: AttentionShape) -> int:
    """Return the bytes of the queries that see a key, and in a backward of their gradients of the output."""
    spans = query_spans(shape, 1, shape.seqlen_k)
    rows = shape.batch * shape.num_heads * len(spans[0])
    columns = shape.head_dim + (shape.head_dim_v if shape.direction is Direction.BACKWARD else 0)
    return rows * columns * shape.element_bytes


def _keys_in(shape: AttentionShape) -> int:
    """Return the bytes of the keys that a query sees, and of their values."""
    if shape.features.mask is MaskKind.BLOCK_SPARSE:
        whole = replace(shape, direction=Direction.FORWARD)
        forward = sparse_forward_traffic(whole, SMALLEST_TILE, SMALLEST_TILE, random_blocks(shape), perfect_l2=True)
        return forward.passes[0].read["k"] + forward.passes[0].read["v"]
    seen = len(key_spans(shape, shape.seqlen_q, 1)[0])
    return shape.batch * shape.num_heads_kv * seen * (shape.head_dim + shape.head_dim_v) * shape.kv_bytes


def _gradients_out(shape: AttentionShape) -> int:
    """Return the bytes of the gradients of queries, keys and values, zeros included."""
    keys = shape.batch * shape.num_heads_kv * shape.seqlen_k * (shape.head_dim + shape.head_dim_v)
    return (query_rows(shape) * shape.head_dim + keys) * shape.element_bytes

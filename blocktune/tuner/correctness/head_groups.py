"""Which groups of heads a reference covers: a key/value head with all its query heads, of one batch entry."""

import random

from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.correctness.forward import REFERENCE_FLOPS

MIN_GROUPS = 2
MAX_GROUPS = 64
"""More of them only cost time, where each is small."""


def chosen_groups(shape: AttentionShape, seed: int) -> tuple[int, ...]:
    """Return some of the batch * num_heads_kv groups: the first, the last, then random ones."""
    total = shape.batch * shape.num_heads_kv
    flops = 5 * (shape.head_dim + shape.head_dim_v) * shape.seqlen_q * shape.seqlen_k * shape.group_size
    others = random.Random(seed).sample(range(1, total - 1), k=max(0, total - 2))
    ordered = tuple(dict.fromkeys((0, total - 1, *others)))
    return ordered[: max(MIN_GROUPS, min(MAX_GROUPS, int(REFERENCE_FLOPS / 4 / flops)))]

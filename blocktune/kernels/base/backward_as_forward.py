"""A backward as the plain forward whose grid and walks are its own, for models that know forwards.

A program of a backward owns a block of keys of one key head and walks along the queries of every query head of the
group, one head after another. Keys become the queries of that forward, and queries its keys.
"""

from dataclasses import replace

from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.kernels.values.visible_ranges import query_spans

TURNED = {
    Causal.NONE: Causal.NONE,
    Causal.UPPER_LEFT: Causal.LOWER_RIGHT,
    Causal.LOWER_RIGHT: Causal.UPPER_LEFT,
}
"""The mask as the keys see it, last key first: the corner where both sequences begin becomes the one where both end."""


def folded_backward(config: KernelConfig, shape: AttentionShape) -> tuple[KernelConfig, AttentionShape]:
    """Return config and shape of the forward whose blocks own block_n keys of a key head and walk block_m queries at a
    time.

    What a head of a group without others skips is skipped in the forward too. A walk along several heads is as long as
    the mean one: a mask that leaves some keys more queries than others is not one of a forward then.
    """
    turned = replace(config, block_m=config.block_n, block_n=config.block_m)
    folded = replace(
        shape,
        num_heads=shape.num_heads_kv,
        seqlen_q=shape.seqlen_k,
        seqlen_k=shape.seqlen_q,
        direction=Direction.FORWARD,
    )
    if shape.group_size == 1:
        return turned, replace(folded, causal=TURNED[shape.causal], features=_turned_window(shape))
    blocks = -(-shape.seqlen_k // config.block_n)
    tiles = sum(-(-len(span) // config.block_m) for span in query_spans(shape, config.block_m, config.block_n))
    walk = round(shape.group_size * tiles / blocks)
    alone = replace(shape.features, window=None)
    return turned, replace(folded, seqlen_k=max(1, walk) * config.block_m, causal=Causal.NONE, features=alone)


def _turned_window(shape: AttentionShape) -> Features:
    """Turn the mask: a causal mask is turned with its window; alone, left and right change places."""
    window = shape.features.window
    if window is None or shape.causal is not Causal.NONE:
        return shape.features
    return replace(shape.features, window=(window[1], window[0]))

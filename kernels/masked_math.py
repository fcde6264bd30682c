"""Attention under a boolean mask in plain PyTorch: what computes a call that no kernel of ours serves."""

import torch
from torch import Tensor


def masked_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale * query key^T) value over the keys that are seen, and the natural log-sum-exp, in float32 inside.

    query [batch, num_heads, seqlen_q, head_dim], key and value [batch, num_heads_kv, seqlen_k, head_dim(_v)], seen a
    boolean tensor broadcastable to [batch, num_heads, seqlen_q, seqlen_k]; what stands in unseen keys, NaN included,
    changes nothing. A row that sees no key gives 0 and -inf. All scores are in memory.

    Returns:
        the output like query, and the log-sum-exp float32 [batch, num_heads, seqlen_q].
    """
    group = query.shape[1] // key.shape[1]
    wide_key, wide_value = (tensor.float().repeat_interleave(group, 1) for tensor in (key, value))
    scores = query.float() @ wide_key.mT * scale
    scores = torch.where(seen, scores, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    probabilities = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None])
    anyone = seen.expand(scores.shape).any(-2)  # 0 * NaN is NaN: a value that nobody sees is taken as 0
    clean = torch.where(anyone[..., None], wide_value, 0.0)
    return (probabilities @ clean).to(query.dtype), lse

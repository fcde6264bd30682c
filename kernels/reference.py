"""Attention as its definition says it: the ground truth of every test, check and tuning run."""

from typing import TYPE_CHECKING

from blocktune.kernels.shape import Causal

if TYPE_CHECKING:
    import torch


def attention_reference(
    q: "torch.Tensor",
    k: "torch.Tensor",
    v: "torch.Tensor",
    *,
    causal: Causal = Causal.NONE,
    scale: float | None = None,
    dtype: "torch.dtype | None" = None,
) -> "tuple[torch.Tensor, torch.Tensor]":
    """softmax(scale * q k^T) v and the natural log-sum-exp of every row (Vaswani et al., arXiv 1706.03762, equation 1).

    q [..., num_heads, seqlen_q, head_dim], k and v [..., num_heads_kv, seqlen_k, head_dim(_v)] with num_heads a
    multiple of num_heads_kv; scale is 1 / sqrt(head_dim) unless given. Computed in `dtype` (float32 unless given) on
    the tensors' device, with all seqlen_q * seqlen_k scores of every head in memory. A row without keys gives 0, -inf.

    Returns:
        the output [..., num_heads, seqlen_q, head_dim_v] and the log-sum-exp [..., num_heads, seqlen_q], in `dtype`.
    """
    import torch

    dtype = torch.float32 if dtype is None else dtype
    group_size = q.shape[-3] // k.shape[-3]
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(group_size, dim=-3) for tensor in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal is not Causal.NONE:
        scores = scores.masked_fill(~visible(q.shape[-2], k.shape[-2], causal, q.device), float("-inf"))
    lse = torch.logsumexp(scores, -1)
    probabilities = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1))
    return probabilities @ v, lse


def visible(seqlen_q: int, seqlen_k: int, causal: Causal, device: "torch.device") -> "torch.Tensor":
    """[seqlen_q, seqlen_k], True where the query sees the key."""
    import torch

    offset = seqlen_k - seqlen_q if causal is Causal.LOWER_RIGHT else 0
    everything = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    return everything if causal is Causal.NONE else everything.tril(offset)

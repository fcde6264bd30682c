"""The ops that scaled_dot_product_attention calls on CUDA: FlashAttention's pair and cuDNN's.

Each function has its op's arguments behind the server, and returns the op's results; or None where the kernel that was
there before computes the call. Dropout is always its: its backward drops other pairs than ours.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blocktune.runtime.provider.op_call import PLAIN, OpCall, lower_right, upper_left

if TYPE_CHECKING:
    from blocktune.runtime.provider.server import OpServer

Results = tuple[Any, ...] | None


def flash_forward(
    server: "OpServer",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Results:
    """Return the results of `_scaled_dot_product_flash_attention`; the log-sum-exp is [batch, heads, seqlen_q]."""
    if dropout_p or return_debug_mask:
        return None
    found = server.forward(OpCall(PLAIN, lower_right(is_causal), scale), query, key, value)
    if found is None:
        return None
    return *found, None, None, query.shape[2], key.shape[2], *unused_results(query)


def flash_backward(
    server: "OpServer",
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Results:
    """Return the results of `_scaled_dot_product_flash_attention_backward`; it does not matter whose forward it was."""
    del max_q, max_k, philox_seed, philox_offset
    if dropout_p or cum_seq_q is not None or cum_seq_k is not None:
        return None
    asked = OpCall(PLAIN, lower_right(is_causal), scale)
    return server.backward(asked, grad_out, query, key, value, out, logsumexp)


def cudnn_forward(
    server: "OpServer",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Results:
    """Return the results of `_scaled_dot_product_cudnn_attention`; the log-sum-exp is [batch, heads, seqlen_q, 1]."""
    if dropout_p or return_debug_mask:
        return None
    asked = OpCall(PLAIN, upper_left(is_causal), scale, compute_log_sumexp)
    found = server.forward(asked, query, key, value, mask=attn_bias)
    if found is None:
        return None
    out, lse = found
    sums = None if lse is None else lse.unsqueeze(-1)
    seed = query.new_empty((), dtype=torch.int64)  # nothing reads it where nothing is dropped
    return out, sums, None, None, query.shape[2], key.shape[2], seed, seed.new_empty(()), None


def cudnn_backward(
    server: "OpServer",
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Results:
    """Return the results of `_scaled_dot_product_cudnn_attention_backward`; it does not matter whose forward it was."""
    del max_q, max_k, philox_seed, philox_offset
    if dropout_p or cum_seq_q is not None or cum_seq_k is not None:
        return None
    asked = OpCall(PLAIN, upper_left(is_causal), scale)
    return server.backward(asked, grad_out, query, key, value, out, logsumexp.squeeze(-1), mask=attn_bias)


def unused_results(query: Tensor) -> tuple[Tensor, ...]:
    """Return what FlashAttention's forward returns behind the log-sum-exp, where nothing is dropped: the state of the
    generator, which nothing reads then, and an empty mask."""
    state = query.new_empty(2, dtype=torch.uint64)
    return state, state.new_empty(()), query.new_empty(0)


def write_output(out: Tensor, results: Results) -> Tensor | None:
    """Write the output of an op's results into `out`, and return the log-sum-exp; None where there are no results."""
    if results is None:
        return None
    out.copy_(results[0])
    sums: Tensor = results[1]
    return sums

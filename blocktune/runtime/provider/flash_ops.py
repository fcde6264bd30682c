"""The ops that PyTorch's FlashAttention is made of: tensors [batch, length, heads, dim], or [tokens, heads, dim].

The functions are as those of sdpa_ops.py.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from blocktune.runtime.provider.op_call import (
    LENGTH_FIRST,
    PACKED,
    OpCall,
    bounded_window,
    longest_of,
    lower_right,
    splits,
)
from blocktune.runtime.provider.sdpa_ops import Results, unused_results, write_output

if TYPE_CHECKING:
    from blocktune.runtime.provider.server import OpServer


def worker_forward(
    server: "OpServer",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Results:
    """Return the results of `_flash_attention_forward`; the log-sum-exp is [batch, heads, seqlen_q], or [heads,
    tokens]."""
    if dropout_p or return_debug_mask or alibi_slopes is not None:
        return None
    window = bounded_window(window_size_left, window_size_right)
    if cum_seq_q is not None:
        asked = OpCall(
            PACKED, lower_right(is_causal), scale, True, window, longest_of(max_q, max_k), splits(num_splits)
        )
        found = server.packed(asked, query, key, value, cum_seq_q, cum_seq_k, seqused_k, block_table)
    elif seqused_k is None and block_table is None and num_splits is None:
        found = server.forward(OpCall(LENGTH_FIRST, lower_right(is_causal), scale, True, window), query, key, value)
    else:
        return None
    return None if found is None else (*found, *unused_results(query))


def worker_forward_into(
    server: "OpServer",
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | None:
    """Return the result of `_flash_attention_forward_no_dropout_inplace`, the log-sum-exp."""
    found = worker_forward(
        server, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
        scale=scale, window_size_left=window_size_left, window_size_right=window_size_right, seqused_k=seqused_k,
        alibi_slopes=alibi_slopes, block_table=block_table, num_splits=num_splits,
    )  # fmt: skip
    return write_output(out, found)


def worker_backward(
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
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Results:
    """Return the results of `_flash_attention_backward`."""
    del rng_state, unused
    if dropout_p:
        return None
    window, results = bounded_window(window_size_left, window_size_right), (out, logsumexp)
    if cum_seq_q is None:
        asked = OpCall(LENGTH_FIRST, lower_right(is_causal), scale, True, window)
        return server.backward(asked, grad_out, query, key, value, *results)
    asked = OpCall(PACKED, lower_right(is_causal), scale, True, window, longest_of(max_q, max_k))
    return server.backward(asked, grad_out, query, key, value, *results, bounds=(cum_seq_q, cum_seq_k))

"""The ops of `torch.nn.attention.varlen`, which PyTorch computes by FlashAttention or, from 2.14 on, by cuDNN.

`backend` says which of the two it has chosen; both have FlashAttention's diagonal where they are chosen. The functions
are as those of sdpa_ops.py.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blocktune.runtime.provider.op_call import PACKED, OpCall, bounded_window, longest_of, lower_right, splits
from blocktune.runtime.provider.sdpa_ops import Results, write_output

if TYPE_CHECKING:
    from blocktune.runtime.provider.server import OpServer


def varlen_forward(
    server: "OpServer",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    backend: int = 0,
) -> Results:
    """Return the results of `_varlen_attn`; the log-sum-exp is [heads, tokens]."""
    del enable_gqa, backend
    longest, window = longest_of(max_q, max_k), _window(window_size)
    asked = OpCall(PACKED, lower_right(is_causal), scale, True, window, longest, splits(num_splits))
    found = server.packed(asked, query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table)
    if found is None:
        return None
    return *found, query.new_empty(2, dtype=torch.uint64)


def varlen_forward_into(
    server: "OpServer",
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    backend: int = 0,
) -> Tensor | None:
    """Return the result of `_varlen_attn_out`, the log-sum-exp."""
    found = varlen_forward(
        server, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
        is_causal, scale, window_size, enable_gqa, seqused_k, block_table, num_splits, backend,
    )  # fmt: skip
    return write_output(out, found)


def varlen_backward(
    server: "OpServer",
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    backend: int = 0,
) -> Results:
    """Return the results of `_varlen_attn_backward`."""
    del rng_state, backend
    asked = OpCall(PACKED, lower_right(is_causal), scale, True, _window(window_size), longest_of(max_q, max_k))
    return server.backward(asked, grad_out, query, key, value, out, lse, bounds=(cu_seq_q, cu_seq_k))


def _window(sides: Sequence[int] | None) -> tuple[int, int]:
    return bounded_window(*(sides or (None, None)))

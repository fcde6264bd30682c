"""`torch.nn.attention.varlen`'s function with our kernels: packed sequences, keys that are partly filled, pages."""

from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import UNLIMITED
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.api.cache.paged_sequences import Tokens
from blocktune.runtime.api.flash_arguments import length_of, splits_of, whole_number, window_of
from blocktune.runtime.api.flash_attn import attend_packed
from blocktune.runtime.dispatch.call_checks import check_dimensions
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention
from blocktune.runtime.dispatch.launches.dtensors import refuse_distributed
from blocktune.runtime.dispatch.sdpa_arguments import scale_of


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (UNLIMITED, UNLIMITED),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    dispatcher: Dispatcher = attention,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `torch.nn.attention.varlen.varlen_attn`, with gradients for everything.

    query [tokens_q, num_heads, head_dim], key and value [tokens_k, num_heads_kv, head_dim(_v)], or with block_table
    (int32 [sequences, max_pages]) pages [pages, page_size, num_heads_kv, head_dim(_v)]. cu_seq_q and cu_seq_k: int32
    [sequences + 1]; the latter may be None with block_table. seqused_k: int32 [sequences], how many keys of each
    sequence take part; block_table needs it. window_size (-1, 0) is causal from the lower right, as is_causal of older
    versions is. num_splits: any number but None makes a sequence's result equal to the bit whatever else is in the
    batch, by kernels that do not split keys. dispatcher: whose configs serve the call.

    Returns:
        the output [tokens_q, num_heads, head_dim_v]; where return_aux.lse is true also the log-sum-exp float32
        [num_heads, tokens_q].

    Raises:
        UsageError: tensors do not fit each other, or an argument is missing or out of range.
    """
    check_dimensions("[tokens, heads, dim]", query=query)
    heads_kv = key.shape[-2] if key.dim() > 1 else 0
    if not enable_gqa and heads_kv != query.shape[1]:
        raise UsageError(
            f"`query` and `key` must have as many heads without enable_gqa, but got {query.shape[1]} and {heads_kv}. "
            "Pass enable_gqa=True for grouped heads."
        )
    bounds_k, longest_k = cu_seq_k, length_of("max_k", max_k)
    if seqused_k is not None:
        refuse_distributed(query, "Packed sequences with seqused_k")
        key, value, bounds_k = used_keys(key, value, cu_seq_q, cu_seq_k, seqused_k, block_table)
    elif block_table is not None:
        raise UsageError("`block_table` needs seqused_k, but got none. Give the number of keys of every sequence.")
    if bounds_k is None:
        raise UsageError(
            "`cu_seq_k` is required without block_table, but got None. Pass the offset at which the keys of each "
            "sequence begin."
        )
    asked: dict[str, Any] = {
        "causal": Causal.LOWER_RIGHT if is_causal else Causal.NONE,
        "scale": scale_of(query, scale),
        "window": window_of(window_size),
        "num_splits": 0 if num_splits is None else min(splits_of(whole_number("num_splits", num_splits)), 1),
    }
    longest = length_of("max_q", max_q), longest_k
    wants_lse = return_aux is not None and bool(return_aux.lse)
    out, lse = attend_packed(
        query, key, value, (cu_seq_q, bounds_k), longest, asked, lse=wants_lse, table=block_table, dispatcher=dispatcher
    )
    return (out, lse) if wants_lse else out


def used_keys(
    key: Tensor, value: Tensor, begins_q: Tensor, begins_k: Tensor | None, used: Tensor, table: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys and values of which `used` take part, and where each sequence of these begins.

    Raises:
        UsageError: `used` is not int32 [sequences], or nothing says where the sequences begin.
    """
    bounds = torch.nn.functional.pad(_lengths(used, begins_q).cumsum(0, dtype=torch.int32), (1, 0))
    if table is None:
        key, value = _used_rows(key, value, begins_k, bounds)
    return key, value, bounds


def _lengths(used: Tensor, bounds: Tensor) -> Tensor:
    """Return the lengths of used keys.

    Raises:
        UsageError: they are not int32 [sequences].
    """
    check_dimensions("[sequences]", seqused_k=used)
    if used.dtype != torch.int32 or used.shape[0] != bounds.shape[0] - 1:
        raise UsageError(
            f"`seqused_k` must be int32 [sequences] with {bounds.shape[0] - 1} sequences, but got {used.dtype} "
            f"{tuple(used.shape)}. Convert it with .to(torch.int32)."
        )
    return used


def _used_rows(key: Tensor, value: Tensor, begins: Tensor | None, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values that take part, one sequence right after the other, from sequences that begin
    elsewhere.

    Raises:
        UsageError: nothing says where.
    """
    if begins is None:
        raise UsageError(
            "`seqused_k` needs cu_seq_k or block_table, but got neither. Pass the offset at which the keys of each "
            "sequence begin."
        )
    tokens = Tokens.of(bounds, key.shape[0])
    rows = (begins.long()[tokens.sequence] + tokens.place).clamp(max=max(key.shape[0] - 1, 0))
    return key[rows], value[rows]

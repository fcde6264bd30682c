"""Attention for Hugging Face transformers: the function that its models call by name.

A model calls (`integrations/sdpa_attention.py` of transformers 5 is the pattern) with query [batch, heads, L, E], key
and value [batch, heads_kv, S, E], not repeated, and with whatever its forward got as keywords. Where there is a mask,
it alone decides which pairs take part: padding, windows, packed sequences and the length of a static cache are in it.
Without a mask more than one query means causal from the upper left, and one query means all keys, unless keywords say
where packed sequences begin (`packed_batches`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import UNLIMITED, bounded_side
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.api.flash_arguments import whole_number
from blocktune.runtime.api.hugging_face.packed_batches import (
    PackedBatch,
    attend_batch,
    is_packed,
    join_cached_keys,
    keep_within_sequences,
)
from blocktune.runtime.dispatch.call_checks import check_mask, check_sinks
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention
from blocktune.runtime.dispatch.sdpa_arguments import mask_of_scores, scale_of

NO_CONCERN = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "seq_idx",
        "use_cache",
    }
)
"""Keywords on their way through a model that change nothing here: what attention must know of them is in the mask."""


def transformers_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    dispatcher: Dispatcher = attention,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention as a model of transformers asks for it: the output [batch, L, heads, Ev], and no weights.

    attention_mask: [batch or 1, heads or 1, L, S], True where the query sees the key, or added to the scores. With a
    mask sliding_window is in the mask already; without one it is the number of last keys that a query sees. s_aux
    [heads]: attention sinks. cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k describe packed sequences, as
    FlashAttention's functions take them; batches of `generate_batch` have them.

    Raises:
        NotImplementedError: a keyword asks for what is not served (position bias, weights), or is not known here.
    """
    wanted = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if is_packed(others, attention_mask):
        key, value = join_cached_keys(module, key, value, others)
        batch = PackedBatch.of(others)
        refuse_others(others)
        left, cap = _left_side(sliding_window), softcap or 0.0
        options: dict[str, Any] = {"causal": wanted, "left": left, "scaling": scaling, "softcap": cap}
        out = attend_batch(query, key, value, batch, dropout=dropout, sinks=s_aux, dispatcher=dispatcher, **options)
        return out, None
    refuse_others(others)
    if attention_mask is not None:
        attention_mask = keep_within_sequences(attention_mask, query, key, others)
    queries = query.shape[2]
    causal = queries > 1 and attention_mask is None and wanted
    if causal and key.shape[2] > queries:  # the first call with a static cache: what follows is not written yet
        key, value = key[:, :, :queries], value[:, :, :queries]
    left = UNLIMITED if attention_mask is not None else _left_side(sliding_window)
    is_windowed = UNLIMITED < left < (queries if causal else key.shape[2]) - 1  # which begins at the upper left
    if softcap is None and s_aux is None and not is_windowed:
        shared = bool(query.shape[1] != key.shape[1])
        options = {"is_causal": causal, "scale": scaling, "enable_gqa": shared}
        out = dispatcher(query, key, value, attention_mask, dropout, **options)
    else:
        window = (left, 0) if is_windowed else (UNLIMITED, UNLIMITED)
        diagonal = _diagonal(queries, causal, is_windowed)
        way = ("transformers", str(diagonal), scaling, window, softcap, dropout)
        out = _attend(dispatcher, way, (query, key, value, attention_mask, s_aux), diagonal)
    return out.transpose(1, 2).contiguous(), None


def _left_side(sliding_window: int | None) -> int:
    """Return the left side of the window of a query that sees the last `sliding_window` keys.

    Raises:
        WrongTypeError: it is no whole number.
        UsageError: it is below 1.
    """
    if sliding_window is None:
        return UNLIMITED
    keys = whole_number("sliding_window", sliding_window)
    if keys < 1:
        raise UsageError(f"`sliding_window >= 1` must hold, but got {keys}. Give None for no window.")
    return bounded_side(keys - 1)


def _attend(
    dispatcher: Dispatcher,
    way: tuple[Any, ...],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    diagonal: Causal,
) -> Tensor:
    """Return the output of a call with a window, a soft cap or sinks; way: its options, by which the next one is
    served.

    Raises:
        UsageError: the mask does not fit the scores.
    """
    query, key, value, mask, sinks = tensors
    bound = None if is_compiling() else dispatcher.find_dense_call(way, *tensors)
    if bound is not None:
        return bound(query, key, value, *(tensor for tensor in (mask, sinks) if tensor is not None))[0]
    if mask is not None:
        check_mask(mask, query, key)
    *_, scaling, window, softcap, dropout = way
    out, _ = dispatcher.attend(
        query,
        key,
        value,
        causal=diagonal,
        scale=scale_of(query, scaling),
        window=window,
        softcap=softcap or 0.0,
        dropout_p=dropout,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        mask=None if mask is None else mask_of_scores(mask, key.shape[2]),
        sinks=check_sinks(sinks, query.shape[1], query),
        remember=lambda fast_path, bound: fast_path.add(way, tensors, bound),
    )
    return out


def _diagonal(queries: int, causal: bool, is_windowed: bool) -> Causal:
    """Return where a window stands: causal from the upper left, or for a single query at the last key.

    Raises:
        NotImplementedError: the call has a window and many queries, but is not causal.
    """
    if is_windowed and not causal and queries > 1:
        raise NotImplementedError(
            f"`sliding_window` without a mask needs causal attention or one query, but got {queries} queries. Load the "
            "model with attn_implementation='sdpa'."
        )
    if causal:
        return Causal.UPPER_LEFT
    return Causal.LOWER_RIGHT if is_windowed else Causal.NONE


def refuse_others(others: dict[str, Any]) -> None:
    """Refuse what our kernels do not serve.

    Raises:
        NotImplementedError: a keyword is given that would change the result.
    """
    given = [name for name, value in others.items() if value is not None and value is not False]
    strange = sorted(set(given) - NO_CONCERN)
    if strange:
        raise NotImplementedError(
            f"`{', '.join(strange)}` of this model is not served by blocktune. Load the model with "
            "attn_implementation='eager'."
        )

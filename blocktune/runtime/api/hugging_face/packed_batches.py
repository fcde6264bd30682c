"""Packed sequences of transformers: training without padding, and the batches of `generate_batch`.

`generate_batch` packs the new tokens of all requests, and keeps their keys in pages. A batch with a prompt in it comes
with the keys that its queries see, gathered from the pages. A batch of one token for each request comes with the pages
and a table of them: attention writes the new keys there, and reads all keys there.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Module

from blocktune.kernels.values.features import UNLIMITED
from blocktune.runtime.api.cache.paged_sequences import Tokens
from blocktune.runtime.api.flash_arguments import whole_number
from blocktune.runtime.api.flash_attn import flash_attn_varlen_func
from blocktune.runtime.api.kv_cache import flash_attn_with_kvcache
from blocktune.runtime.dispatch.dispatcher import Dispatcher

BATCH_INDEX = "write_index"
"""The keyword by which a batch of `generate_batch` is known: where its new keys belong."""

OF_BATCHES = ("logits_indices", "logits_processor_args", "read_index", BATCH_INDEX)
"""Keywords of such a batch that attention has no use for."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Where the sequences of a batch begin, int32 [sequences + 1], their longest lengths, and the pages of their keys.

    pages: k and v [pages, page_size, num_heads_kv, head_dim], and the table int32 [sequences, max_pages].
    """

    begins_q: Tensor
    begins_k: Tensor
    longest: tuple[int, int]
    pages: tuple[Tensor, Tensor, Tensor] | None

    @classmethod
    def of(cls, keywords: dict[str, Any]) -> Self:
        """Return the batch that a layer's keywords describe, and take it out of them."""
        begins_q, begins_k = keywords.pop("cu_seq_lens_q"), keywords.pop("cu_seq_lens_k", None)
        begins_k = begins_q if begins_k is None else begins_k
        longest_q = longest_of("max_length_q", keywords.pop("max_length_q", None), begins_q)
        longest_k = longest_of("max_length_k", keywords.pop("max_length_k", None), begins_k)
        table, k_pages, v_pages = (keywords.pop(name, None) for name in ("block_table", "k_cache", "v_cache"))
        for name in OF_BATCHES:
            keywords.pop(name, None)
        return cls(begins_q, begins_k, (longest_q, longest_k), None if table is None else (k_pages, v_pages, table))


def longest_of(name: str, given: Any, begins: Tensor) -> int:
    """Return the length of the longest sequence, which is counted where it is not given.

    Raises:
        WrongTypeError: it is no whole number.
    """
    return whole_number(name, begins.diff().max() if given is None else given)


def is_packed(keywords: dict[str, Any], attention_mask: Tensor | None) -> bool:
    """Return whether a layer's keywords describe sequences, and no mask has to be kept.

    Masks of `generate_batch` know nothing of keys in pages: transformers 5.23 makes them, though nothing reads them.
    """
    begins = keywords.get("cu_seq_lens_q")
    if begins is None or BATCH_INDEX in keywords:
        return begins is not None
    return attention_mask is None and begins.numel() > 2


def keep_within_sequences(mask: Tensor, query: Tensor, key: Tensor, keywords: dict[str, Any]) -> Tensor:
    """Return a mask that broadcasts to [batch, heads, L, S], without the pairs of different sequences that a layer's
    keywords describe.

    A model that leaves positions out of its mask, as GPT-OSS does, has a mask which does not keep them apart.
    """
    begins_q = keywords.get("cu_seq_lens_q")
    if begins_q is None or begins_q.numel() <= 2:
        return mask
    begins_k = keywords.get("cu_seq_lens_k")
    batch = query.shape[0]
    sides = ((begins_q, query.shape[2]), (begins_q if begins_k is None else begins_k, key.shape[2]))
    of_query, of_key = (Tokens.of(begins, batch * count).sequence.view(batch, 1, count) for begins, count in sides)
    same = of_query[..., None] == of_key[..., None, :]
    return mask & same if mask.dtype is torch.bool else torch.where(same, mask, float("-inf"))


def join_cached_keys(module: Module, key: Tensor, value: Tensor, keywords: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a batch after those in its cache, where the layer left this to attention, as in
    transformers 5.23. The cache changes the keywords in place."""
    cache = keywords.pop("cache", None) if BATCH_INDEX in keywords else None
    if cache is None:
        return key, value
    joined: tuple[Tensor, Tensor] = cache.update(key, value, layer_idx=module.layer_idx, kwargs=keywords)
    return joined


def attend_batch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: PackedBatch,
    *,
    causal: bool,
    left: int,
    scaling: float | None,
    softcap: float,
    dropout: float,
    sinks: Tensor | None,
    dispatcher: Dispatcher,
) -> Tensor:
    """Compute attention of packed sequences: query [batch, num_heads, L, head_dim], keys and values likewise.

    left: how many keys before its own a query sees, -1 for all; without causal as many after it.

    Returns:
        the output [batch, L, num_heads, head_dim_v].

    Raises:
        UsageError: tensors do not fit each other, or what describes the sequences.
    """
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))  # [tokens, heads, dim]
    options: dict[str, Any] = {"softmax_scale": scaling, "causal": causal, "softcap": softcap, "s_aux": sinks}
    options |= {"window_size": (left, UNLIMITED if causal else left), "dispatcher": dispatcher}
    if batch.pages is None:
        bounds = batch.begins_q, batch.begins_k
        out = flash_attn_varlen_func(q, k, v, *bounds, *batch.longest, dropout_p=dropout, **options)
    else:
        out = attend_pages(q, k, v, batch.begins_k, *batch.pages, **options)
    assert isinstance(out, Tensor)  # no log-sum-exp was wanted
    return out.unflatten(0, (query.shape[0], query.shape[2]))


def attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begins_k: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    **options: Any,
) -> Tensor:
    """Write one token of each sequence [sequences, heads, dim] into the pages, and return its attention.

    Graphs are captured with more sequences than there are: those have no keys and a table of -1. They write to page 0,
    which transformers leaves free.
    """
    sequences = q.shape[0]
    written = (begins_k[1 : sequences + 1] - begins_k[:sequences] - 1).clamp(min=0)
    q, k, v = (tensor.unsqueeze(1) for tensor in (q, k, v))
    places = {"cache_seqlens": written, "block_table": table.clamp(min=0)}
    out = flash_attn_with_kvcache(q, k_pages, v_pages, k, v, **places, **options)
    assert isinstance(out, Tensor)
    return out.flatten(0, 1)

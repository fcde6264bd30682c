"""SGLang's FlashAttention back-end, with blocktune's kernels for decoders over a cache of 16 bits in pages.

What they do not serve goes to the parent: latent attention, 8-bit caches, speculative steps, cross and local attention,
context parallelism, whole prefills in a captured graph, and pages of fewer than 16 tokens.
"""

from typing import Any

from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend, FlashAttentionMetadata
from sglang.srt.layers.cp.utils import is_cp_active
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from torch import Tensor

from blocktune.integrations import BatchAttention, PagedBatch

INVARIANT_SPLITS = 16
"""Parts of the keys of a decoded token under `--enable-deterministic-inference`: one number for every batch."""
SMALLEST_PAGE = 16
"""Smaller pages are read row by row."""


class BlocktuneBackend(FlashAttentionBackend):
    """The parent's metadata and captured graphs, with another attention."""

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **features: Any,
    ) -> Any:
        """Return the attention [tokens, heads * columns] of new tokens, whose keys go into the cache first."""
        served = self._attend(q, k, v, layer, forward_batch, save_kv_cache, features)
        if served is not None:
            return served
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **features)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **features: Any,
    ) -> Any:
        """Return the attention [tokens, heads * columns] of one token of each sequence, as `forward_extend` does."""
        served = self._attend(q, k, v, layer, forward_batch, save_kv_cache, features)
        if served is not None:
            return served
        return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **features)

    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        features: dict[str, Any],
    ) -> Tensor | None:
        """Return the attention, None where the parent computes it."""
        metadata, sinks = self.forward_metadata, features.get("sinks")
        decodes, table = forward_batch.forward_mode.is_decode(), self._table(layer, metadata)
        others = [value for name, value in features.items() if name != "sinks"]
        if table is None or not all(value is None or value is False for value in others):
            return None
        if not self._is_plain(q, layer, forward_batch) or (decodes and table.shape[0] != q.shape[0]):
            return None
        attention = BatchAttention(
            scale=layer.scaling,
            window=(layer.sliding_window_size, 0) if _is_local(layer) else (-1, -1),
            softcap=layer.logit_cap,
            sinks=sinks,
            num_splits=INVARIANT_SPLITS if self.num_splits else 0,
        )
        batch = PagedBatch(
            begins=metadata.cu_seqlens_q,
            lengths=metadata.cache_seqlens_int32,
            table=table,
            longest=metadata.max_seq_len_q,
            singles=table.shape[0] if decodes else 0,
        )
        if save_kv_cache and k is not None:
            self._save(k, v, layer, forward_batch)
        query = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        given = getattr(forward_batch, "_attn_output", None)
        sizes = query.shape[0], layer.tp_q_head_num, layer.v_head_dim
        out = query.new_empty(sizes) if given is None else given.view(sizes)
        if attention.write(out, query, *self.get_paged_mha_kv_cache(layer), batch):
            return out.view(query.shape[0], -1)
        forward = super().forward_decode if decodes else super().forward_extend
        return forward(q, k, v, layer, forward_batch, False, **features)  # the keys are in the cache

    def _is_plain(self, q: Tensor, layer: RadixAttention, forward_batch: ForwardBatch) -> bool:
        """Return whether a call is one of a decoder's layer over the pages that its sequences have."""
        modes = ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE
        return (
            forward_batch.forward_mode in modes
            and forward_batch.spec_info is None
            and layer.attn_type == AttentionType.DECODER
            and not layer.is_cross_attention
            and not is_cp_active(forward_batch)
            and self.forward_metadata is not self.full_cg_prefill_metadata
            and self.forward_metadata.image_token_ranges is None
            and self.page_size >= SMALLEST_PAGE
            and q.dtype is self.kv_cache_dtype
            and not (self.use_mla or self.fa_skip_kv_cache or self.is_prefill_aware_swa)
            and not (self.local_attn_builder or self._kv_shard_pool or self.kv_index_translator.is_translating)
        )

    def _table(self, layer: RadixAttention, metadata: FlashAttentionMetadata) -> Tensor | None:
        """Return the pages of each sequence in the pool of a layer."""
        if _is_local(layer) and self.use_sliding_window_kv_pool:
            return metadata.swa_page_table
        return metadata.page_table

    def _save(self, k: Tensor, v: Tensor | None, layer: RadixAttention, forward_batch: ForwardBatch) -> None:
        """Write new keys and values into the cache, as the parent does."""
        places = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=self.forward_metadata.swa_out_cache_loc)
        self.token_to_kv_pool.set_kv_buffer(layer, places, k, v, layer.k_scale, layer.v_scale)


def _is_local(layer: RadixAttention) -> bool:
    return layer.sliding_window_size is not None and layer.sliding_window_size > -1

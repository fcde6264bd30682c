"""vLLM's FlashAttention back-end, with blocktune's kernels for decoders over a cache of 16 bits.

What they do not serve goes to the parent: 8-bit caches, ALiBi, encoders and cross attention, context parallelism, masks
that are no window, and steps whose requests differ in causality.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from blocktune.integrations import BatchAttention, PagedBatch

INVARIANT_SPLITS = 16
"""Parts of the keys of a decoded token where `VLLM_BATCH_INVARIANT` is set: one number for every step."""


@dataclass
class BlocktuneMetadata(FlashAttentionMetadata):
    """The parent's, and how many requests at the beginning of the step have one query each."""

    singles: int = 0


class BlocktuneMetadataBuilder(FlashAttentionMetadataBuilder):
    """The parent's. A captured step keeps its number of single queries, so only uniform steps are captured whole."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold = 1
    """Requests of one query come first."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> BlocktuneMetadata:
        """Return the metadata of a step, without waiting for the GPU."""
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        requests, _, tokens, _ = split_decodes_and_prefills(common_attn_metadata)
        return BlocktuneMetadata(**vars(found), singles=requests if requests == tokens else 0)


class BlocktuneImpl(FlashAttentionImpl):
    """Attention of one layer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._attention = BatchAttention(
            scale=self.scale,
            window=self.sliding_window,
            softcap=self.logits_soft_cap,
            sinks=self.sinks,
            num_splits=INVARIANT_SPLITS if self.batch_invariant_enabled else 0,
        )
        self._is_plain = (
            self.attn_type == AttentionType.DECODER and self.alibi_slopes is None and self.dcp_world_size == 1
        )

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the attention of a step to the output, whose keys are in the cache already, and return it."""
        is_fused = output_scale is not None or output_block_scale is not None
        if self._is_plain and not is_fused and self._write(query, kv_cache, attn_metadata, output):
            return output
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )

    def _write(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
    ) -> bool:
        """Return whether blocktune's kernels have written the output."""
        if not isinstance(metadata, BlocktuneMetadata) or metadata.causal is not True:
            return False
        if kv_cache.dtype is not query.dtype:
            return False
        if metadata.mm_prefix_query_range_tensor is not None or metadata.rswa_prefix_lens is not None:
            return False
        # a page is [heads, rows, columns of the key and of the value]
        pages = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        k_pages, v_pages = map(canonicalize_singleton_dim_strides, pages)
        batch = PagedBatch(
            begins=metadata.query_start_loc,
            lengths=metadata.seq_lens,
            table=metadata.block_table,
            longest=metadata.max_query_len,
            singles=metadata.singles,
        )
        count = metadata.num_actual_tokens
        return self._attention.write(output[:count], query[:count], k_pages, v_pages, batch)


class BlocktuneBackend(FlashAttentionBackend):
    """The parent with the classes above. Its name stays, by which vLLM finds what a back-end is."""

    @staticmethod
    def get_impl_cls() -> type[BlocktuneImpl]:
        """Return the class of a layer's attention."""
        return BlocktuneImpl

    @staticmethod
    def get_builder_cls() -> type[BlocktuneMetadataBuilder]:
        """Return the class that makes a step's metadata."""
        return BlocktuneMetadataBuilder

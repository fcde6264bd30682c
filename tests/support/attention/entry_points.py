"""Every entry point with the tensors of a small call, for what PyTorch's tools must do with each of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blocktune import (
    BlockMask,
    attention,
    attention_fp8,
    block_sparse_attention,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    tree_attention,
    varlen_attn,
)

EntryPoint = tuple[Callable[..., Any], tuple[Tensor, ...]]
"""A function of tensors alone, and the tensors."""
E4M3 = torch.float8_e4m3fn


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes)


def integers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def entry_points() -> dict[str, EntryPoint]:
    """The entry points by name, those that take several kinds of tensors more than once."""
    return dense() | packed() | cached()


def dense() -> dict[str, EntryPoint]:
    """Those of batches of one length."""
    qkv = random(3, 4, 20, 16), random(3, 2, 24, 16), random(3, 2, 24, 16)
    flash = tuple(tensor.transpose(1, 2).contiguous() for tensor in qkv)
    blocks = torch.tensor([[[[True, False], [True, True]]]])
    slopes, sinks, mask = torch.rand(4), torch.rand(4), torch.rand(3, 1, 20, 24) > 0.2
    return {
        "attention": (lambda q, k, v: attention(q, k, v, enable_gqa=True), qkv),
        "attention, mask": (lambda q, k, v, seen: attention(q, k, v, seen, enable_gqa=True), (*qkv, mask)),
        "flash_attn_func": (lambda q, k, v: flash_attn_func(q, k, v), flash),
        "flash_attn_func, features": (
            lambda q, k, v, slopes, sinks: flash_attn_func(
                q, k, v, causal=True, window_size=(3, 0), softcap=4.0, alibi_slopes=slopes, s_aux=sinks,
                return_attn_probs=True,
            )[:2],
            (*flash, slopes, sinks),
        ),
        "flash_attn_qkvpacked_func": (flash_attn_qkvpacked_func, (random(3, 20, 3, 4, 16),)),
        "flash_attn_kvpacked_func": (flash_attn_kvpacked_func, (flash[0], random(3, 24, 2, 2, 16))),
        "block_sparse_attention": (
            lambda q, k, v, blocks: block_sparse_attention(q, k, v, BlockMask(16, 16, blocks)),
            (random(3, 4, 32, 16), random(3, 2, 32, 16), random(3, 2, 32, 16), blocks),
        ),
        "attention_fp8": (
            lambda q, k, v, scale: attention_fp8(q, k, v, scale_q=scale),
            (*(tensor.to(E4M3) for tensor in qkv), torch.rand(4)),
        ),
    }  # fmt: skip


def packed() -> dict[str, EntryPoint]:
    """Those of packed sequences."""
    q, k, v = random(20, 4, 16), random(24, 2, 16), random(24, 2, 16)
    bounds, bounds_k, used = integers(0, 4, 9, 20), integers(0, 4, 10, 24), integers(3, 2, 7)
    pages, table = (random(9, 8, 2, 16), random(9, 8, 2, 16)), integers([0, 1, 4], [2, 3, 8], [5, 7, 6])
    ends = bounds, bounds_k

    def over_pages(longest: int) -> Callable[..., Any]:
        return lambda q, k, v, ends, ends_k, table: flash_attn_varlen_func(
            q, k, v, ends, ends_k, longest, 20, block_table=table
        )

    return {
        "flash_attn_varlen_func": (
            lambda q, k, v, ends, ends_k: flash_attn_varlen_func(q, k, v, ends, ends_k, 16, 20, causal=True),
            (q, k, v, *ends),
        ),
        "flash_attn_varlen_func, features": (
            lambda q, k, v, ends, slopes: flash_attn_varlen_func(
                q, k, v, ends, ends, 16, 16, window_size=(3, 2), alibi_slopes=slopes, return_attn_probs=True
            )[:2],
            (q, random(20, 2, 16), random(20, 2, 16), bounds, torch.rand(4)),
        ),
        "flash_attn_varlen_func, pages": (over_pages(16), (q, *pages, *ends, table)),
        "flash_attn_varlen_func, pages, many queries": (over_pages(40), (q, *pages, *ends, table)),
        "flash_attn_varlen_qkvpacked_func": (
            lambda qkv, ends: flash_attn_varlen_qkvpacked_func(qkv, ends, 16),
            (random(20, 3, 4, 16), bounds),
        ),
        "flash_attn_varlen_kvpacked_func": (
            lambda q, kv, ends, ends_k: flash_attn_varlen_kvpacked_func(q, kv, ends, ends_k, 16, 20),
            (q, random(24, 2, 2, 16), *ends),
        ),
        "varlen_attn": (
            lambda q, k, v, ends, ends_k: varlen_attn(q, k, v, ends, ends_k, 16, 20, enable_gqa=True),
            (q, k, v, *ends),
        ),
        "varlen_attn, some keys": (
            lambda q, k, v, ends, ends_k, used: varlen_attn(
                q, k, v, ends, ends_k, 16, 20, enable_gqa=True, seqused_k=used
            ),
            (q, k, v, *ends, used),
        ),
        "varlen_attn, pages": (
            lambda q, k, v, ends, used, table: varlen_attn(
                q, k, v, ends, None, 16, 20, enable_gqa=True, seqused_k=used, block_table=table
            ),
            (q, *pages, bounds, used, table),
        ),
    }


def cached() -> dict[str, EntryPoint]:
    """Those over caches."""
    q, new = random(3, 2, 4, 16), random(3, 2, 2, 16)
    caches, lengths = (random(5, 32, 2, 16), random(5, 32, 2, 16)), integers(5, 9, 20)
    entries, table = tuple(cache[:3] for cache in caches), integers([0, 4], [2, 3], [1, 1])
    angles = torch.rand(40, 4)
    return {
        "flash_attn_with_kvcache": (
            lambda q, k, v, lengths: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True),
            (q, *entries, lengths),
        ),
        "flash_attn_with_kvcache, one length": (
            lambda q, k, v: flash_attn_with_kvcache(q, k, v, cache_seqlens=7, return_softmax_lse=True),
            (q, *entries),
        ),
        "flash_attn_with_kvcache, new rows": (
            lambda q, k, v, new, lengths: flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=lengths),
            (q, *entries, new, lengths),
        ),
        "flash_attn_with_kvcache, rotation": (
            lambda q, k, v, new, angles, lengths: flash_attn_with_kvcache(
                q, k, v, new, new, angles, angles, cache_seqlens=lengths, causal=True
            ),
            (q, *entries, new, angles, lengths),
        ),
        "flash_attn_with_kvcache, pages": (
            lambda q, k, v, lengths, table: flash_attn_with_kvcache(
                q, k, v, cache_seqlens=lengths, block_table=table, return_softmax_lse=True
            ),
            (q, *caches, lengths, table),
        ),
        "flash_attn_with_kvcache, new rows in pages": (
            lambda q, k, v, new, lengths, table: flash_attn_with_kvcache(
                q, k, v, new, new, cache_seqlens=lengths, block_table=table
            ),
            (q, *caches, new, lengths, table),
        ),
        "flash_attn_with_kvcache, entries": (
            lambda q, k, v, lengths, index, padding: flash_attn_with_kvcache(
                q, k, v, cache_seqlens=lengths, cache_batch_idx=index, cache_leftpad=padding
            ),
            (q, *caches, lengths, integers(4, 0, 2), integers(0, 2, 5)),
        ),
        "flash_attn_with_kvcache, 8 bits": (
            lambda q, k, v, new, lengths, scale: flash_attn_with_kvcache(
                q, k, v, new, new, cache_seqlens=lengths, k_descale=scale, v_descale=0.5
            ),
            (q, *(cache.to(E4M3) for cache in entries), new, lengths, torch.rand(2)),
        ),
        "tree_attention": (
            lambda q, k, v, tree, lengths: tree_attention(q, k, v, tree, lengths),
            (random(3, 4, 3, 16), *entries, torch.ones(3, 3, 1, dtype=torch.int32), lengths),
        ),
    }

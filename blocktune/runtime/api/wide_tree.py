"""Trees of more drafts than the kernels read bits of: attention over the cache before the drafts, and over the drafts
by a mask of pairs, merged."""

from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.values.shape import Causal
from blocktune.kernels.values.tree_mask import WORD_BITS
from blocktune.runtime.api.partial_results import merge_partial
from blocktune.runtime.dispatch.dispatcher import Dispatcher


def wide_tree_attention(
    query: Tensor, k_pages: Tensor, v_pages: Tensor, tree_mask: Tensor, asked: dict[str, Any], dispatcher: Dispatcher
) -> Tensor:
    """Return what `tree_attention` returns, of sound arguments.

    Args:
        query: [batch, num_heads, drafts, head_dim].
        k_pages: [batch, seqlen, heads, dim], or pages where there is a table.
        v_pages: likewise.
        tree_mask: int32 [batch, drafts, words].
        asked: what a call over the cache asks for.
        dispatcher: whose configs serve both parts.
    """
    drafts, lengths = query.shape[2], asked["cache_seqlens"]
    keys, values = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    earlier = (lengths - drafts).clamp(min=0)
    before = dispatcher.attend(query, keys, values, lse=True, **asked | {"cache_seqlens": earlier})
    rows = (lengths.long() - drafts)[:, None] + torch.arange(drafts, device=lengths.device)
    own = [_rows_of(pages, rows, asked["block_table"]).transpose(1, 2) for pages in (k_pages, v_pages)]
    mask = (_visible_pairs(tree_mask, drafts) & (rows >= 0)[:, None])[:, None]
    among = dispatcher.attend(query, *own, lse=True, causal=Causal.NONE, scale=asked["scale"], mask=mask)
    out, _ = merge_partial(before[0].transpose(1, 2), before[1], among[0].transpose(1, 2), among[1])
    return out.transpose(1, 2)


def _rows_of(pages: Tensor, rows: Tensor, table: Tensor | None) -> Tensor:
    """Return these rows of each entry, int64 [batch, count], as [batch, count, heads, dim]; zeros for negative ones."""
    present = rows >= 0
    rows = rows.clamp(min=0)
    if table is None:
        found = pages[torch.arange(len(rows), device=rows.device)[:, None], rows]
    else:
        size = pages.shape[1]
        page = table.long().gather(1, rows // size).where(present, 0)  # an empty entry's table may hold anything
        found = pages[page, rows % size]
    return found.masked_fill(~present[..., None, None], 0.0)


def _visible_pairs(tree_mask: Tensor, drafts: int) -> Tensor:
    """Return bool [batch, drafts, drafts], True where a draft sees another."""
    bits = torch.arange(WORD_BITS, device=tree_mask.device)
    return (tree_mask[..., None] >> bits & 1).flatten(2)[..., :drafts] != 0

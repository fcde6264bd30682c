"""The blocks of queries that see each tile of keys under a block mask, as the Hopper backward walks them.

    lists = walk_lists(mask, shape)
    step(..., lists, *list_strides(mask, lists))

Tiles are 64 queries by 128 keys, so that a mask's blocks have to be whole tiles of 64 by 64: where only one half of a
tile's keys takes part, the other half is masked.
"""

from typing import TYPE_CHECKING, Any

from blocktune.kernels.hopper.backward.layout import BLOCK_M, BLOCK_N
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape, Causal

if TYPE_CHECKING:
    from torch import Tensor

    from blocktune.kernels.values.block_mask import BlockMask

HALF = BLOCK_N // 2
"""The keys of a warpgroup."""
HEAD = 2
"""Numbers ahead of a list's entries."""


def walk_lists(mask: "BlockMask", shape: AttentionShape) -> "Tensor":
    """Return the lists, int32 [batch or 1, heads or 1, tiles of keys, HEAD + 2 * tiles of queries]; a mask keeps them.

    A list begins with the number of its masked blocks and the number of all, one at least. Its entries follow, the
    masked blocks first: the first query of each, plus 1 where the first half of the keys is hidden and 2 where the
    second half is. As many turns come last: how many tiles of keys add to the block's dq before this one does, and -1
    for a tile without any.

    Raises:
        UsageError: tiles do not make up the mask's blocks.
    """
    key = "hopper backward", shape.seqlen_q, shape.seqlen_k, shape.causal
    return mask.keep(key, lambda: _walk_lists(mask, shape))


def list_strides(mask: "BlockMask", lists: "Tensor") -> tuple[int, int, int]:
    """Return the strides of lists by (batch entry, query head, tile of keys), in elements; 0 where one serves all."""
    batch, heads, tile, _ = lists.stride()
    return batch if mask.mask.shape[0] > 1 else 0, heads if mask.mask.shape[1] > 1 else 0, tile


def _walk_lists(mask: "BlockMask", shape: AttentionShape) -> "Tensor":
    import torch

    # [batch or 1, heads or 1, tiles of keys, tiles of queries]
    first, second = _seen_halves(mask, shape).unbind(3)
    seen = first | second
    masked = seen & ~(first & second & _whole(shape, seen.device))
    # 0 masked, 1 whole, 2 hidden
    order = torch.argsort(2 - 2 * seen.int() + (seen & ~masked).int(), dim=-1, stable=True)
    queries = torch.arange(seen.shape[3], device=seen.device) * BLOCK_M
    entries = queries + (~first).int() + 2 * (~second).int()
    turns = seen.int().cumsum(2) - seen.int()
    turns = torch.where(seen.any(-1, keepdim=True), turns, -1)
    count = seen.sum(-1)
    head = torch.stack((torch.where(count > 0, masked.sum(-1), 1), count.clamp(min=1)), -1)
    return torch.cat((head, entries.gather(-1, order), turns.gather(-1, order)), -1).int().contiguous()


def _seen_halves(mask: "BlockMask", shape: AttentionShape) -> "Tensor":
    """Return whether a block of queries sees any key of a half: [batch or 1, heads or 1, tiles of keys, 2, tiles of
    queries]."""
    import torch

    for name, block, tile in (("block_q", mask.block_q, BLOCK_M), ("block_k", mask.block_k, HALF)):
        if block % tile:
            raise UsageError(
                f"`{name}` of the BlockMask must be a multiple of {tile} for the Hopper backward, but got {block}. "
                "Make a BlockMask of larger blocks, or bind a config of flash_bwd_sparse."
            )
    tiles_q, tiles_k = -(-shape.seqlen_q // BLOCK_M), -(-shape.seqlen_k // BLOCK_N)
    cells = mask.mask.repeat_interleave(mask.block_q // BLOCK_M, 2).repeat_interleave(mask.block_k // HALF, 3)
    cells = cells[:, :, :tiles_q, : 2 * tiles_k]
    cells = torch.nn.functional.pad(cells, (0, 2 * tiles_k - cells.shape[3]))
    if shape.causal is not Causal.NONE:
        last_query = torch.arange(1, tiles_q + 1, device=cells.device) * BLOCK_M - 1
        first_key = torch.arange(2 * tiles_k, device=cells.device) * HALF
        cells = cells & (last_query[:, None] + shape.causal_offset >= first_key)
    return cells.transpose(2, 3).unflatten(2, (tiles_k, 2))


def _whole(shape: AttentionShape, device: Any) -> "Tensor":
    """Return which tiles neither the ends of the sequences nor the diagonal cut: [tiles of keys, tiles of queries]."""
    import torch

    keys = torch.arange(0, shape.seqlen_k, BLOCK_N, device=device)[:, None] + BLOCK_N
    queries = torch.arange(0, shape.seqlen_q, BLOCK_M, device=device)
    whole = (keys <= shape.seqlen_k) & (queries + BLOCK_M <= shape.seqlen_q)
    if shape.causal is not Causal.NONE:
        whole = whole & (queries + shape.causal_offset >= keys - 1)
    return whole

"""A mask tensor as the registers of the Hopper forward want it: the pass that writes it ahead of the attention.

A thread of a warpgroup has of every eight keys two, in two of 64 rows. So the pass cuts a mask into tiles of 64 queries
and 128 keys. Of a boolean one each pair of keys that a thread has in a row becomes two bits of a word: [64, 4] words,
one load a row for 128 keys, an eighth of the bytes. Of an additive one the values of a thread stand side by side,
bounded as kernels/portable/forward/masked_rows.py says. What
lies beyond the last key is hidden, so that no step of the attention asks for the end of the keys. Tiles that lie wholly
outside a causal mask or a window are left out: what a step may read of them is hidden.

The pass runs in every call. A copy that is kept would have to notice every write to the mask, and those of a CUDA
graph or of another library leave no trace. It reads the mask once, where the attention of every head reads it again.
"""

from dataclasses import dataclass
from typing import Any, Self

import triton
import triton.language as tl

from blocktune.kernels.base.feature_arguments import broadcast_strides, own_mask_sizes
from blocktune.kernels.portable.forward.masked_rows import bounded_mask

ROWS = 64
KEYS = 128
WORDS = 256
"""Of a boolean tile."""
Bounds = tuple[int | None, int | None]
"""(right, left): query i sees the keys i + left .. i + right, None without such a bound."""


@triton.jit(do_not_specialize=["heads", "seqlen_q", "seqlen_k", "tiles_q", "tiles_k", "right", "left"])
def lay_out_mask_kernel(
    Mask, Laid, stride_mb, stride_mh, stride_mm, stride_mn, heads, seqlen_q, seqlen_k, tiles_q, tiles_k, right, left,
    BOOLEAN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Write Laid [batch, heads, tiles_q, tiles_k] tiles of Mask, uint8 or float with strides of (batch, head, query,
    key): a program writes one, unless no query i of it sees a key, of i + left .. i + right."""
    tile = tl.program_id(0).to(tl.int64)
    entry, rest = tile // (tiles_q * tiles_k), tile % (tiles_q * tiles_k)
    row, key = rest // tiles_k * ROWS, rest % tiles_k * KEYS
    if (key >= row + ROWS + right) | (key + KEYS <= row + left):
        return
    rows = (row + tl.arange(0, ROWS))[:, None]
    keys = (key + tl.arange(0, KEYS))[None, :]
    base = Mask + entry // heads * stride_mb + entry % heads * stride_mh
    pointers = base + rows * stride_mm + keys * stride_mn
    # [ROWS, KEYS]
    if BOOLEAN:
        seen = tl.load(pointers, mask=(rows < seqlen_q) & (keys < seqlen_k), other=0) != 0
        bits = seen.to(tl.int32) << (keys % KEYS // 8 * 2 + keys % 2).to(tl.int32)
        # row | eight keys | pair | key of it
        bits = tl.reshape(bits, [ROWS, KEYS // 8, 4, 2])
        # [ROWS, 4]
        words = tl.sum(tl.sum(bits, 3), 1)
        places = tl.arange(0, ROWS)[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(Laid + tile * (ROWS * 4) + places, words)
    else:
        values = tl.load(pointers, mask=(rows < seqlen_q) & (keys < seqlen_k), other=float("-inf"))
        values = bounded_mask(values.to(tl.float32)).to(values.dtype)
        # warp | + 8 rows | lane / 4 | sixteen keys | + 8 keys | lane % 4 | pair
        values = tl.reshape(values, [4, 2, 8, KEYS // 16, 2, 4, 2])
        values = tl.reshape(tl.permute(values, (3, 0, 2, 5, 4, 1, 6)), [ROWS * KEYS])
        tl.store(Laid + tile * (ROWS * KEYS) + tl.arange(0, ROWS * KEYS), values)


@dataclass(frozen=True, slots=True)
class LaidMask:
    """The sizes of a mask that is laid out: tiles of queries and keys of `heads` heads of `batch` entries. Where all
    heads, entries or queries have one, so has it."""

    boolean: bool
    batch: int
    heads: int
    tiles_q: int
    tiles_k: int

    @classmethod
    def of(cls, mask: Any) -> Self:
        """Return the sizes for a mask [batch or 1, num_heads or 1, seqlen_q or 1, seqlen_k], any of them expanded."""
        import torch

        boolean = mask.dtype in (torch.bool, torch.uint8)
        batch, heads, queries = own_mask_sizes(mask)
        return cls(boolean, batch, heads, -(-queries // ROWS), -(-mask.shape[3] // KEYS))

    @property
    def tile(self) -> int:
        """Elements of a tile."""
        return WORDS if self.boolean else ROWS * KEYS

    @property
    def programs(self) -> int:
        return self.batch * self.heads * self.tiles_q * self.tiles_k

    def strides(self, mask: Any) -> tuple[int, int, int]:
        """Return the strides of (batch, head, 64 queries) in tiles, 0 where the mask has one for all."""
        strides = self.heads * self.tiles_q * self.tiles_k, self.tiles_q * self.tiles_k, self.tiles_k
        own = zip(own_mask_sizes(mask), strides, strict=True)
        batch, head, rows = (0 if size == 1 else stride for size, stride in own)
        return batch, head, rows

    def arguments(self, mask: Any, bounds: Bounds = (None, None)) -> tuple[Any, ...]:
        """Return what the pass takes after the two tensors. A query that all share fills a tile, and sees all keys."""
        queries, keys = own_mask_sizes(mask)[2], mask.shape[3]
        sizes = self.heads, ROWS if queries == 1 else queries, keys
        right, left = (None, None) if queries == 1 else bounds
        seen = keys if right is None else right, -mask.shape[2] if left is None else left
        return *broadcast_strides(mask, 4), *sizes, self.tiles_q, self.tiles_k, *seen, self.boolean, ROWS, KEYS

"""Block-sparse masks: which whole blocks of (query, key) pairs take part, and the lists that kernels walk.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (arXiv 2205.14135), algorithm
5: blocks of the attention matrix whose mask is zero are skipped, so that time and traffic follow the mask's density.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import MAX_SIZE
from blocktune.kernels.values.shape import AttentionShape

Lists = TypeVar("Lists")

MIN_MASK_BLOCK = 16
"""Queries or keys of the smallest block: tensor cores take no smaller tile."""

Predicate = Callable[[Tensor, Tensor], Tensor]
"""From block numbers of queries [rows, 1] and of keys [1, columns] to bool [rows, columns], or with heads and batch in
front."""


@dataclass(frozen=True, slots=True)
class BlockLists:
    """The active blocks in every row of blocks, int32 [batch or 1, heads or 1, rows, columns + 1], contiguous.

    indices: the numbers of a row's active blocks, ascending; what follows them are further valid numbers, so that a
    kernel may read ahead. before: how many active blocks have a smaller number than the position; the last one counts
    all. A causal kernel finds there, with one load, where in the list the diagonal is.
    """

    indices: Tensor
    before: Tensor

    @property
    def counts(self) -> Tensor:
        """Active blocks of every row, int32 [batch or 1, heads or 1, rows]."""
        return self.before[..., -1]

    @classmethod
    def of(cls, mask: Tensor) -> Self:
        """Return the lists of a boolean mask [batch or 1, heads or 1, rows, columns], on its device."""
        # stable: the active blocks of a row stay ascending, and the others follow them
        order = torch.argsort(mask.to(torch.uint8), dim=-1, descending=True, stable=True)
        total = mask.to(torch.int32).cumsum(-1, dtype=torch.int32)
        pad = torch.nn.functional.pad
        return cls(pad(order.to(torch.int32), (0, 1)).contiguous(), pad(total, (1, 0)).contiguous())


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which blocks of block_q queries by block_k keys take part in attention: all pairs of a block, or none.

    mask: bool [batch or 1, heads or 1, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)], heads counting query heads;
    a block at the end may reach beyond the sequences. A causal call hides pairs above the diagonal in addition. The
    lists are made once, with the first launch: a mask that is written to afterwards must become a new `BlockMask`.

    Raises:
        UsageError: a block size is not a power of two of at least 16 and below 2**31, or the mask is not boolean with
            four dimensions.
    """

    block_q: int
    block_k: int
    mask: Tensor

    def __post_init__(self) -> None:
        _check_blocks(self.block_q, self.block_k)
        if not isinstance(self.mask, Tensor) or self.mask.dtype is not torch.bool:
            got = self.mask.dtype if isinstance(self.mask, Tensor) else type(self.mask).__name__
            raise UsageError(
                f"`mask` of a BlockMask must be a boolean tensor, but got {got}. Convert it with `mask != 0`."
            )
        if self.mask.dim() != 4 or 0 in self.mask.shape:
            raise UsageError(
                "`mask` of a BlockMask must be [batch or 1, heads or 1, query blocks, key blocks], none of them 0, "
                f"but got {tuple(self.mask.shape)}. Use `BlockMask.from_dense` for a mask of single pairs."
            )

    @classmethod
    def from_dense(cls, mask: Tensor, *, block_q: int, block_k: int) -> Self:
        """Return the block mask that shows the very pairs that `mask` shows.

        Args:
            mask: bool [seqlen_q, seqlen_k], with heads, or batch and heads, in front; True where the query sees the
                key.

        Raises:
            UsageError: a block is visible in part only, or the arguments break a rule of `BlockMask`.
        """
        _check_blocks(block_q, block_k)
        if mask.dtype is not torch.bool or not 2 <= mask.dim() <= 4 or 0 in mask.shape:
            raise UsageError(
                "`mask` must be boolean and [seqlen_q, seqlen_k], with heads, or batch and heads, in front, but got "
                f"{mask.dtype} {tuple(mask.shape)}."
            )
        dense = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
        seen = _in_blocks(dense, block_q, block_k, False).any(-1).any(-2)
        whole = _in_blocks(dense, block_q, block_k, True).all(-1).all(-2)
        _refuse_partial(seen & ~whole, block_q, block_k)
        return cls(block_q, block_k, seen)

    @classmethod
    def from_predicate(
        cls,
        predicate: Predicate,
        *,
        seqlen_q: int,
        seqlen_k: int,
        block_q: int,
        block_k: int,
        device: torch.device | str | None = None,
    ) -> Self:
        """Return the block mask of a rule, such as `lambda q_block, k_block: abs(q_block - k_block) < 3`.

        Args:
            predicate: gets int64 block numbers, of queries [rows, 1] and of keys [1, columns], and returns bool
                [rows, columns], with heads, or batch and heads, in front if they differ.

        Raises:
            UsageError: a length is not positive, the rule returns something else, or a block size breaks a rule.
        """
        _check_blocks(block_q, block_k)
        if seqlen_q <= 0 or seqlen_k <= 0:
            raise UsageError(
                f"Lengths must be positive, but got (seqlen_q={seqlen_q}, seqlen_k={seqlen_k}). Give both in tokens."
            )
        rows = torch.arange(-(-seqlen_q // block_q), device=device)[:, None]
        columns = torch.arange(-(-seqlen_k // block_k), device=device)[None, :]
        active = predicate(rows, columns)
        if not isinstance(active, Tensor) or active.dtype is not torch.bool or active.dim() > 4:
            got = f"{active.dtype} {tuple(active.shape)}" if isinstance(active, Tensor) else type(active).__name__
            raise UsageError(f"The predicate must return a boolean tensor of at most four dimensions, but got {got}.")
        sizes = (1,) * (4 - active.dim()) + tuple(active.shape)
        return cls(block_q, block_k, active.reshape(sizes).expand(*sizes[:2], len(rows), columns.shape[1]).contiguous())

    @classmethod
    def butterfly(
        cls, *, seqlen_q: int, seqlen_k: int, block_q: int, block_k: int, device: torch.device | str | None = None
    ) -> Self:
        """Return the fixed butterfly pattern: a block sees itself and those whose numbers differ from its own in one
        bit, so that log2(blocks) layers connect every pair (Dao et al., "Pixelated Butterfly", arXiv 2112.00029). Of
        more query blocks than key blocks, or fewer, several share a number.

        Raises:
            UsageError: a length is not positive, or a block size breaks a rule.
        """
        _check_blocks(block_q, block_k)
        blocks = -(-seqlen_q // block_q), -(-seqlen_k // block_k)

        def sees(rows: Tensor, columns: Tensor) -> Tensor:
            fewer = min(blocks)
            differing = (rows * fewer // blocks[0]) ^ (columns * fewer // blocks[1])
            return (differing & (differing - 1)) == 0

        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_q": block_q, "block_k": block_k}
        return cls.from_predicate(sees, **sizes, device=device)

    @classmethod
    def local_and_global(
        cls,
        *,
        local: int,
        global_tokens: int = 0,
        seqlen_q: int,
        seqlen_k: int,
        block_q: int,
        block_k: int,
        device: torch.device | str | None = None,
    ) -> Self:
        """Return the whole blocks around a band and its global tokens, as Longformer and BigBird have them.

        Args:
            local: a block is active if one of its pairs is at most this many tokens apart; the last query stands at the
                last key.
            global_tokens: how many first keys all queries see, and how many first queries see all keys.

        Raises:
            UsageError: a number of tokens is negative, a length is not positive, or a block size breaks a rule.
        """
        if local < 0 or global_tokens < 0:
            raise UsageError(
                f"Tokens must not be negative, but got (local={local}, global_tokens={global_tokens}). Give 0 for none."
            )

        def sees(rows: Tensor, columns: Tensor) -> Tensor:
            query, key = rows * block_q + seqlen_k - seqlen_q, columns * block_k
            gap = torch.maximum(key - (query + block_q - 1), query - (key + block_k - 1))
            return (gap <= local) | (key < global_tokens) | (rows * block_q < global_tokens)

        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_q": block_q, "block_k": block_k}
        return cls.from_predicate(sees, **sizes, device=device)

    @property
    def density(self) -> float:
        """The share of active blocks, 0 to 1. Waits for the mask's device."""
        return float(self.mask.float().mean())

    def to_dense(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> Tensor:
        """Return bool [batch or 1, heads or 1, seqlen_q, seqlen_k], whole blocks unless lengths are given."""
        dense = self.mask.repeat_interleave(self.block_q, 2).repeat_interleave(self.block_k, 3)
        return dense[:, :, :seqlen_q, :seqlen_k]

    @property
    def rows(self) -> BlockLists:
        """For every block of queries the active blocks of keys: for the output and the gradient of the queries."""
        return self.keep("rows", lambda: BlockLists.of(self.mask))

    @property
    def columns(self) -> BlockLists:
        """For every block of keys the active blocks of queries: for the gradients of keys and values."""
        return self.keep("columns", lambda: BlockLists.of(self.mask.transpose(-1, -2)))

    def keep(self, key: object, make: Callable[[], Lists]) -> Lists:
        """Return the lists of a key, made at its first use. Those that are made in a CUDA graph are not kept: their
        memory is the graph's, and they hold nothing before a replay."""
        found: Lists | None = self._kept.get(key)
        if found is not None:
            return found
        made = make()
        if not (self.mask.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._kept[key] = made
        return made

    @cached_property
    def _kept(self) -> dict[object, Any]:
        return {}

    def check_fits(self, shape: AttentionShape) -> None:
        """Check that the mask fits a shape.

        Raises:
            UsageError: the mask belongs to other lengths, heads or batches than the shape's.
        """
        wanted = (-(-shape.seqlen_q // self.block_q), -(-shape.seqlen_k // self.block_k))
        batch, heads, *blocks = self.mask.shape
        if tuple(blocks) != wanted:
            raise UsageError(
                f"A BlockMask of {self.block_q}x{self.block_k} blocks for (seqlen_q={shape.seqlen_q}, "
                f"seqlen_k={shape.seqlen_k}) must have {wanted} blocks, but got {tuple(blocks)}. Make it for these "
                "lengths."
            )
        if batch not in (1, shape.batch) or heads not in (1, shape.num_heads):
            raise UsageError(
                "A BlockMask must have the batch of the tensors or 1, and all query heads or 1, but got "
                f"(batch={batch}, heads={heads}) for (batch={shape.batch}, num_heads={shape.num_heads}). Give 1 for a "
                "dimension that shares the mask."
            )

    def strides(self, lists: BlockLists) -> tuple[int, int, int]:
        """Return the strides of lists by (batch, head, row), in elements; 0 where one serves all."""
        batch, heads, row, _ = lists.indices.stride()
        return batch if self.mask.shape[0] > 1 else 0, heads if self.mask.shape[1] > 1 else 0, row


def _check_blocks(block_q: int, block_k: int) -> None:
    for name, size in (("block_q", block_q), ("block_k", block_k)):
        if type(size) is not int or not MIN_MASK_BLOCK <= size <= MAX_SIZE or size & (size - 1):
            raise UsageError(
                f"`{name}` of a BlockMask must be a power of two of at least {MIN_MASK_BLOCK} and below 2**31, but got "
                f"{name}={size!r:.80}. Take 64 or 128."
            )


def _in_blocks(dense: Tensor, block_q: int, block_k: int, fill: bool) -> Tensor:
    """Return [batch, heads, query blocks, block_q, key blocks, block_k], with `fill` beyond the sequences."""
    batch, heads, seqlen_q, seqlen_k = dense.shape
    padded = torch.nn.functional.pad(dense, (0, -seqlen_k % block_k, 0, -seqlen_q % block_q), value=fill)
    return padded.reshape(batch, heads, -(-seqlen_q // block_q), block_q, -(-seqlen_k // block_k), block_k)


def _refuse_partial(partial: Tensor, block_q: int, block_k: int) -> None:
    """Check that no partial block is True everywhere.

    Raises:
        UsageError: a block of partial [batch, heads, query blocks, key blocks] is True.
    """
    if not partial.any():
        return
    batch, head, row, column = partial.nonzero()[0].tolist()
    raise UsageError(
        f"Blocks of {block_q}x{block_k} must be visible as a whole or not at all, but the block of queries "
        f"{row * block_q}.. and keys {column * block_k}.. (batch {batch}, head {head}) is partly visible, and so are "
        f"{int(partial.sum()) - 1} more. Take smaller blocks, `attn_mask` for any pairs, or a causal call for the "
        "diagonal."
    )

"""Trees of drafts for speculative decoding as bit masks: which earlier drafts each draft sees."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from blocktune.kernels.values.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

WORD_BITS = 32
MAX_DRAFTS = 256
KERNEL_DRAFTS = 64
"""Drafts whose bits kernels read. Of more, `tree_attention` computes the cache before them and the drafts apart."""


def tree_words(parents: Sequence[int | None]) -> "Tensor":
    """Return the mask of one tree as `Extras.tree_mask` wants it for a batch entry.

    A draft sees itself and its ancestors: bit j % 32 of word j // 32 of row i is set for them. Several roots make a
    forest. Stack the words of all entries for a batch.

    Args:
        parents: for every draft the number of its parent, which comes before it; None for a root.

    Returns:
        int32 [drafts, ceil(drafts / 32)], on the CPU.

    Raises:
        UsageError: there are no drafts or too many, or a parent does not come before its child.
    """
    import torch

    if not 0 < len(parents) <= MAX_DRAFTS:
        raise UsageError(
            f"A tree must have 1 to {MAX_DRAFTS} drafts, but got {len(parents)}. Shorten it, or verify it in several "
            "calls."
        )
    seen: list[int] = []
    for draft, parent in enumerate(parents):
        if parent is not None and (type(parent) is not int or not 0 <= parent < draft):
            raise UsageError(
                f"`0 <= parent < child` must hold, but got parents[{draft}]={parent!r:.80}. "
                "Number the drafts so that a parent comes before its children, and give None for a root."
            )
        seen.append((0 if parent is None else seen[parent]) | 1 << draft)
    words = -(-len(parents) // WORD_BITS)
    rows = [[_word(bits, word) for word in range(words)] for bits in seen]
    return torch.tensor(rows, dtype=torch.int32, device="cpu")


def _word(bits: int, word: int) -> int:
    """Return 32 of the bits as the signed integer that has them."""
    value = bits >> WORD_BITS * word & (1 << WORD_BITS) - 1
    return value - (1 << WORD_BITS) if value >> WORD_BITS - 1 else value

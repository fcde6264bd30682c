"""flash-attention 2's helpers that pack padded sequences and pad them again."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def index_first_axis(rows: Tensor, indices: Tensor) -> Tensor:
    """Return the rows with these numbers."""
    return rows[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return `first_axis_dim` rows: the values in the places of the indices, and zeros."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Return the tokens of padded sequences [batch, seqlen, ...] one after the other, as flash-attention 2.7 and later
    do.

    Args:
        attention_mask: [batch, seqlen], 1 where there is a token. unused_mask: likewise, tokens that get a place and
            take no part.

    Returns:
        the tokens [tokens, ...], their numbers among all places, where sequences begin (int32 [batch + 1]), the length
        of the longest, and how many tokens of each take part (int32 [batch]).
    """
    placed = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = (mask.sum(dim=-1, dtype=torch.int32) for mask in (placed, attention_mask))
    indices = placed.flatten().nonzero().flatten()
    begins = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, begins, int(lengths.max()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return tokens [tokens, ...] in their places of [batch, seqlen, ...], with zeros in the others."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))

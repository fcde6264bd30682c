"""Masks with rows that finite numbers hide, and what kernels leave of such rows."""

import torch

LOWEST = -(2.0**21)
"""From which on a finite number of a mask counts as the least one (kernels/portable/forward/masked_rows.py)."""


def masked_rows(
    rows: int, keys: int, hidden: float, dtype: torch.dtype, *, heads: int = 1, device: str = "cpu"
) -> torch.Tensor:
    """A mask [1, heads, rows, keys] of ordinary numbers, among which every third row is hidden by finite numbers alone,
    every sixth of these in part by -inf; other rows have a few keys of either kind, and one row has -inf alone."""
    generator = torch.Generator().manual_seed(5)
    mask = torch.randn(1, heads, rows, keys, generator=generator)
    mask[:, :, 1::2, 3::7] = hidden
    mask[:, :, :, 5::11] = float("-inf")
    mask[:, :, ::3] = hidden
    mask[:, :, ::6, 2::5] = float("-inf")
    mask[:, :, 4] = float("-inf")
    return mask.to(dtype).to(device)


def lse_of_kernels(scores: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp of scores as the forward kernels leave it for their backwards."""
    masked = (scores.amax(-1) < LOWEST) & ~scores.isneginf().all(-1)
    log2_keys = (scores > float("-inf")).sum(-1).double().log2()
    return torch.where(masked, ((log2_keys + 1) / 4096 - 2) * 2.0**127, scores.logsumexp(-1)).float()

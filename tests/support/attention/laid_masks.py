"""Masks as kernels/hopper/biases/mask_pass.py lays them out, made by PyTorch."""

import torch

from blocktune.kernels.hopper.biases.mask_pass import KEYS, ROWS
from tests.support.attention.masked_rows import LOWEST


def bounded(mask: torch.Tensor) -> torch.Tensor:
    """An additive mask with its lowest finite numbers as the kernels count them."""
    return torch.where((mask < LOWEST) & (mask > float("-inf")), -(2.0**50), mask.float()).to(mask.dtype)


def laid_out(mask: torch.Tensor) -> torch.Tensor:
    """Tiles [batch or 1, heads or 1, 64 queries, 128 keys] of a mask, one after the other: words of a boolean one,
    values of an additive one. A query that all share fills a tile."""
    if mask.shape[2] == 1:
        mask = mask.expand(-1, -1, ROWS, -1)
    boolean = mask.dtype is torch.bool
    batch, heads, queries, keys = mask.shape
    sizes = batch, heads, -(-queries // ROWS) * ROWS, -(-keys // KEYS) * KEYS
    whole = torch.full(sizes, False if boolean else float("-inf"), dtype=mask.dtype)
    whole[:, :, :queries, :keys] = mask if boolean else bounded(mask)
    tiles = whole.view(batch, heads, -1, ROWS, sizes[3] // KEYS, KEYS).transpose(3, 4)
    if boolean:  # row | eight keys | pair | key of it
        pairs = tiles.reshape(*tiles.shape[:4], ROWS, 16, 4, 2).transpose(-3, -2).flatten(-2)
        words = (pairs.long() << torch.arange(32)).sum(-1)
        return torch.where(words < 2**31, words, words - 2**32).int().flatten()
    # warp | + 8 rows | lane / 4 | sixteen keys | + 8 keys | lane % 4 | pair
    parts = tiles.reshape(*tiles.shape[:4], 4, 2, 8, 8, 2, 4, 2)
    return parts.permute(0, 1, 2, 3, 7, 4, 6, 9, 8, 5, 10).flatten()

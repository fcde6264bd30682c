"""Keys and values of 8 bits, which stand for their numbers times a scale: into a cache, and back."""

import torch
from torch import Tensor

from blocktune.kernels.values.features import CacheType

CACHE_TYPES = {torch.float8_e4m3fn: CacheType.E4M3, torch.int8: CacheType.INT8}
BOUNDS = {torch.float8_e4m3fn: (-448.0, 448.0), torch.int8: (-128.0, 127.0)}
"""The least and the largest number of a type."""


def quantize(numbers: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return numbers / scale in an 8-bit type: the nearest there is, an even one of two, and the least or largest for
    what is beyond."""
    quotients = (numbers.float() / scale).clamp(*BOUNDS[dtype])
    return (quotients.round() if dtype is torch.int8 else quotients).to(dtype)


def as_factor(scale: Tensor) -> Tensor:
    """Return what multiplies a cache [batch or pages, num_heads_kv, rows, dim].

    Args:
        scale: [batch or 1, num_heads_kv or 1], or of tokens [batch or pages, rows, num_heads_kv].
    """
    return scale.transpose(1, 2)[..., None] if scale.dim() == 3 else scale[..., None, None]

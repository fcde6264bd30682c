"""Attention with planted faults, by which the check is checked: the scale of a call says what goes wrong."""

import os
import time

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from blocktune import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["attention", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

WRONG, LOST, DEAD, HANGS, RAISES = 0.25, 0.26, 0.27, 0.28, 0.29


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's attention by its MATH backend, unless the scale names a fault; PLANTED_DEAD is another one."""
    if scale in (DEAD, float(os.environ.get("PLANTED_DEAD", DEAD))):
        os._exit(9)
    if scale == HANGS:
        time.sleep(600)
    if scale == RAISES:
        raise RuntimeError("planted")
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    with torch.no_grad():
        if scale == WRONG:
            out.view(-1)[-1] += 0.1
        elif scale == LOST:
            out.view(-1)[-1] = float("nan")
    return out

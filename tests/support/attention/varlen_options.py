"""What `varlen_attn` of the installed PyTorch takes: torch 2.11 knows no groups of heads, pages or given outputs."""

import inspect
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters

GROUPS: dict[str, Any] = {"enable_gqa": True} if TAKES_GROUPS else {}
"""The options of a call whose keys may have fewer heads."""

WRITES_IN_PLACE = hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace")
"""Whether FlashAttention's worker comes in a form that writes into a given output."""

takes_pages = pytest.mark.skipif(
    "block_table" not in inspect.signature(varlen.varlen_attn).parameters,
    reason="varlen_attn of this PyTorch takes no pages and no counts of used keys",
)
takes_output = pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="this PyTorch has no varlen_attn_out")

one_part_or_any = pytest.mark.parametrize(
    "more", [{}, pytest.param({"num_splits": 1}, marks=takes_pages)], ids=["any-parts", "one-part"]
)

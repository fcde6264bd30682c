"""Values narrower or wider than the queries, on a GPU and against float64: every class of padded widths.

What went wrong here once stands in test_operand_widths.py.
"""

from itertools import product

import pytest
import torch

from blocktune import attention
from blocktune.kernels.base.flash_kernel import FlashKernel
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.portable.forward.pointers import FlashForward
from blocktune.kernels.portable.forward.tma import FlashForwardTma
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

WIDTHS = [(64, 32), (40, 24), (32, 16), (160, 16), (128, 32), (224, 17), (112, 17), (129, 16)]
"""Pairs that were wrong."""
CLASSES = [*WIDTHS, *product((16, 32, 64, 128, 256), repeat=2)]
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest absolute difference of outputs and of gradients that are around one."""


def draw(head_dim: int, head_dim_v: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(head_dim * 1000 + head_dim_v)
    sizes = (4, head_dim), (2, head_dim), (2, head_dim_v)
    return [torch.randn(2, heads, length, dim, dtype=dtype, device="cuda") for heads, dim in sizes]


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    query, key, value = query.double(), key.double().repeat_interleave(2, 1), value.double().repeat_interleave(2, 1)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [36, 512])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), CLASSES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_output_and_gradients(dtype: torch.dtype, head_dim: int, head_dim_v: int, length: int, is_causal: bool) -> None:
    tensors = [tensor.requires_grad_() for tensor in draw(head_dim, head_dim_v, length, dtype)]
    with torch.no_grad():
        plain = attention(*tensors, is_causal=is_causal, enable_gqa=True)
    out = attention(*tensors, is_causal=is_causal, enable_gqa=True)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    right = expected(*wide, is_causal=is_causal)
    upstream = torch.randn_like(out)
    gradients = torch.autograd.grad(out, tensors, upstream)
    for found, wanted in zip(
        (plain, out, *gradients), (right, right, *torch.autograd.grad(right, wide, upstream.double())), strict=True
    ):
        scale = max(1.0, wanted.abs().max().item() / 4)
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 32), (32, 16), (128, 32), (16, 64)])
@pytest.mark.parametrize("kernel", [FlashForward(), FlashForwardTma()], ids=lambda kernel: kernel.name)
def test_every_schedule_and_depth(kernel: FlashKernel, head_dim: int, head_dim_v: int) -> None:
    query, key, value = draw(head_dim, head_dim_v, 300, torch.float16)
    right = expected(query, key, value, is_causal=True)
    sizes = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "seqlen_q": 300, "seqlen_k": 300}
    shape = AttentionShape(**sizes, head_dim=head_dim, head_dim_v=head_dim_v, dtype="float16", causal="upper_left")
    for (block_m, num_warps), stages, schedule in product(((64, 4), (128, 8)), (1, 2, 3), (0, 1, 2)):
        own = {"block_m": block_m, "block_n": 64, "num_warps": num_warps, "num_stages": stages, "schedule": schedule}
        config = KernelConfig.of(kernel.name, own)
        assert kernel.violations(config, shape, limits_for((9, 0))) == ()
        out = torch.full_like(right, 7.0, dtype=torch.float16)
        kernel.bind(config, shape)(query, key, value, out, None, head_dim**-0.5)
        assert (out.double() - right).abs().max() < TOLERANCE[torch.float16], config.label

"""Rows that an additive mask hides with finite numbers, through `attention` on a GPU, next to float64."""

import math
from collections.abc import Iterator

import pytest
import torch

from blocktune import attention
from blocktune.runtime.selection import canary
from tests.support.attention.masked_rows import LOWEST, masked_rows

pytestmark = pytest.mark.gpu

LEAST = {"own": None, "float32": torch.finfo(torch.float32).min, "1e9": -1e9}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 8e-3}
"""Largest error, relative to the largest number of the result."""


@pytest.fixture(autouse=True)
def _no_finding() -> Iterator[None]:
    before = canary.counts["wrong"]
    yield
    assert canary.counts["wrong"] == before


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("least", LEAST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_their_weights_add_up_to_one(
    dtype: torch.dtype, least: str, head_dim: int, heads: tuple[int, int], is_causal: bool
) -> None:
    """own: a mask of the tensors' type with its least number, else a float32 mask."""
    rows, keys, hidden = 300, 420, LEAST[least]
    mask_dtype = dtype if hidden is None else torch.float32
    hidden = torch.finfo(dtype).min if hidden is None else hidden
    mask = masked_rows(rows, keys, hidden, mask_dtype, device="cuda")
    if is_causal:
        mask = mask.masked_fill(torch.ones(rows, keys, dtype=torch.bool, device="cuda").triu(1), -math.inf)
    torch.manual_seed(0)
    sizes = (2, heads[0], rows, head_dim), (2, heads[1], keys, head_dim), (2, heads[1], keys, head_dim)
    leaves = [torch.randn(each, device="cuda", dtype=dtype).requires_grad_() for each in sizes]
    out = attention(*leaves, mask, enable_gqa=True)
    grad = torch.randn_like(out)
    found = out, *torch.autograd.grad(out, leaves, grad)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    query, key, value = wide[0], *(leaf.repeat_interleave(heads[0] // heads[1], 1) for leaf in wide[1:])
    low = mask.isfinite() & (mask < LOWEST)
    scores = query @ key.mT * head_dim**-0.5 + mask.double().masked_fill(low, -1e38)
    blind = scores.isneginf().all(-1, keepdim=True)
    right = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ value
    wanted = right, *torch.autograd.grad(right, wide, grad.double())
    # float32 steps by 2^-8 beside -65504, and more where products begin with the log-sum-exp
    tolerance = 8e-2 if hidden == torch.finfo(torch.float16).min else TOLERANCE[dtype]
    for name, own, of_float64 in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        error = (own.double() - of_float64).abs().max() / of_float64.abs().max()
        assert error <= tolerance, f"{name}: {error:.1e}"
    total, expected = found[3].double().sum(2), wanted[3].sum(2)
    assert (total - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_mask_that_is_no_number_reaches_all_gradients_of_its_row(head_dim: int) -> None:
    query, key, value = (
        torch.randn(1, 2, 256, head_dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    mask = torch.zeros(1, 1, 256, 256, device="cuda")
    mask[..., 3, 1] = math.nan
    out = attention(query, key, value, mask)
    dq, dk, dv = torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
    assert dq[:, :, 3].isnan().all()
    assert dk.isnan().all()
    assert dv.isnan().all()

"""Attention over parts of the keys, merged, is attention over all of them."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune import UsageError, flash_attn_func, flash_attn_varlen_func, merge_partial
from tests.runtime.api.test_flash_api import DEVICES, assert_right, defined, exact, random

pytestmark = pytest.mark.triton_free

WIDE = torch.float64


def parts_of(q: Tensor, k: Tensor, v: Tensor, *cuts: int, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """Output and log-sum-exp over every share of the keys [batch, keys, ...]."""
    edges = (0, *cuts, k.shape[1])
    shares = [slice(*edge) for edge in pairwise(edges)]
    return [flash_attn_func(q, k[:, own], v[:, own], return_attn_probs=True, **options)[:2] for own in shares]  # type: ignore[misc]


def merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    result, *others = parts
    for other in others:
        result = merge_partial(*result, *other)
    return result


@pytest.mark.parametrize("cuts", [(20,), (1, 30), (0, 13, 13)])
@pytest.mark.parametrize("device", DEVICES)
def test_parts_make_the_whole(device: str, cuts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, (k, v) = random(2, 17, 4, 64, device=device), (random(2, 40, 2, 64, device=device) for _ in range(2))
    out, lse = merged(parts_of(q, k, v, *cuts))
    right = [defined(*own) for own in zip(*exact(q, k, v), strict=True)]
    assert_right(out, torch.stack([one for one, _ in right]), device)
    assert_right(lse, torch.stack([sums for _, sums in right]), device)


def test_packed_parts_are_merged_likewise() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(12, 4, 16), torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    bounds = [torch.tensor(own, dtype=torch.int32) for own in ([0, 12], [0, 8], [0, 20])]
    whole = flash_attn_varlen_func(q, k, v, bounds[0], bounds[2], 12, 20, return_attn_probs=True)
    first = flash_attn_varlen_func(q, k[:8], v[:8], bounds[0], bounds[1], 12, 8, return_attn_probs=True)
    ends = bounds[2] - bounds[1]
    second = flash_attn_varlen_func(q, k[8:], v[8:], bounds[0], ends, 12, 12, return_attn_probs=True)
    for one, other in zip(merge_partial(*first[:2], *second[:2]), whole[:2], strict=True):
        torch.testing.assert_close(one, other)


def test_a_row_without_keys_weighs_nothing_and_its_gradients_are_numbers() -> None:
    outs = [torch.randn(1, 2, 3, 4, dtype=WIDE), torch.randn(1, 2, 3, 4, dtype=WIDE)]
    sums = [torch.randn(1, 3, 2, dtype=WIDE), torch.randn(1, 3, 2, dtype=WIDE)]
    outs[0][:, 0], sums[0][..., 0] = 0.0, float("-inf")
    outs[1][:, 0, 0], sums[1][:, 0, 0] = 0.0, float("-inf")
    leaves = [tensor.requires_grad_() for tensor in (outs[0], sums[0], outs[1], sums[1])]
    out, lse = merge_partial(*leaves)
    assert torch.equal(out[:, 0], outs[1][:, 0])
    assert torch.equal(lse[..., 0], sums[1][..., 0])
    assert not bool(out[:, 0, 0].any())
    finite = lse.masked_fill(lse.isneginf(), 0.0)
    gradients = torch.autograd.grad(out.square().sum() + finite.square().sum(), leaves)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_its_gradients_are_those_of_the_weights() -> None:
    leaves = [torch.randn(1, 2, 3, 4, dtype=WIDE), torch.randn(1, 3, 2, dtype=WIDE)]
    leaves = [tensor.requires_grad_() for tensor in (*leaves, *(torch.randn_like(own) for own in leaves))]
    assert torch.autograd.gradcheck(merge_partial, leaves)


def test_the_output_keeps_its_type() -> None:
    out, lse = torch.zeros(2, 5, 3, 8, dtype=torch.float16), torch.zeros(2, 3, 5)
    found = merge_partial(out, lse, out, lse)
    assert (found[0].dtype, found[1].dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lse_a": torch.zeros(2, 5, 3)},
        {"out_b": torch.zeros(2, 5, 3, 4)},
        {"lse_b": torch.zeros(2, 3, 4)},
        {"out_a": torch.zeros(3, 8)},
    ],
)
def test_other_sizes_are_refused(wrong: dict[str, Tensor]) -> None:
    given = {"out_a": torch.zeros(2, 5, 3, 8), "lse_a": torch.zeros(2, 3, 5)}
    given |= {"out_b": torch.zeros(2, 5, 3, 8), "lse_b": torch.zeros(2, 3, 5)}
    with pytest.raises(UsageError):
        merge_partial(**given | wrong)


@pytest.mark.parametrize("nothing", [float("-inf"), float("inf")])
@pytest.mark.parametrize("left_over", [float("nan"), float("inf")])
def test_what_a_row_without_keys_holds_changes_nothing(left_over: float, nothing: float) -> None:
    """Producers leave such rows unwritten, and FlashAttention-2 writes inf for their log-sum-exp."""
    outs, sums = torch.randn(2, 1, 3, 2, 4, dtype=WIDE), torch.randn(2, 1, 2, 3, dtype=WIDE)
    outs[0, :, :2], sums[0, ..., :2] = left_over, nothing
    outs[1, :, 1], sums[1, ..., 1] = left_over, nothing
    leaves = [tensor.clone().requires_grad_() for tensor in (outs[0], sums[0], outs[1], sums[1])]
    out, lse = merge_partial(*leaves)
    assert torch.equal(out[:, 0], outs[1, :, 0])
    assert torch.equal(lse[..., 0], sums[1, ..., 0])
    assert not out[:, 1].any()
    assert bool(lse[..., 1].isneginf().all())
    gradients = torch.autograd.grad((out.sum(), lse[..., ::2].sum()), leaves)
    assert all(bool(one.isfinite().all()) for one in gradients)
    assert not gradients[0][:, :2].any()
    assert not gradients[1][..., :2].any()

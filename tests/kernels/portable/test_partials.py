"""Attention over several sets of keys meets in one kernel: in Triton's interpreter on the CPU, compiled on a GPU."""

import pytest
import torch

from blocktune.kernels.portable.partials.gathered import launch_merge_gathered, merge_gathered
from blocktune.kernels.portable.partials.rows import add_partial, launch_add_partial
from tests.support.triton_modes import DEVICE, runs

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
INFINITE = float("inf")


def rows(dtype: str, length: int, dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An output [batch, length, heads, dim] as [batch, heads, length, dim], and a log-sum-exp; some rows saw no key."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(2, length, 3, dim, generator=generator).transpose(1, 2).to(getattr(torch, dtype))
    lse = torch.randn(2, 3, length, generator=generator) * 3.0
    for hidden in (0, seed):
        if length > hidden:
            out[:, :, hidden], lse[..., hidden] = 0.0, -INFINITE
    return out.to(DEVICE), lse.to(DEVICE)


@runs
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("length", "dim"), [(1, 16), (70, 32), (129, 40)])
def test_rows_over_both_sets_of_keys(length: int, dim: int, dtype: str) -> None:
    (out, lse), (part, part_lse) = rows("float32", length, dim, 1), rows(dtype, length, dim, 2)
    weights = torch.stack([lse, part_lse]).double().exp()
    shares = (weights / weights.sum(0)).nan_to_num()
    right = out.double() * shares[0][..., None] + part.double() * shares[1][..., None]
    launch_add_partial(out, lse, part, part_lse, out)
    torch.testing.assert_close(out.double(), right, atol=2e-6, rtol=2e-6)
    wanted = weights.sum(0).log()
    assert torch.equal(lse.isneginf(), wanted.isneginf())
    assert lse[..., 0].isneginf().all()
    visible = ~wanted.isneginf()
    torch.testing.assert_close(lse[visible].double(), wanted[visible], atol=1e-5, rtol=1e-5)


@runs
def test_some_rows_of_larger_tensors_are_written_and_no_others() -> None:
    (out, lse), (part, part_lse) = rows("float32", 90, 24, 1), rows("float16", 40, 24, 2)
    by_torch = out.cpu().double(), lse.cpu().double()
    before = out.clone(), lse.clone()
    launch_add_partial(out[:, :, 30:70], lse[:, :, 30:70], part, part_lse, out[:, :, 30:70])
    some = by_torch[0][:, :, 30:70]
    add_partial(some, by_torch[1][:, :, 30:70], part.cpu().double(), part_lse.cpu().double(), some)
    for found, right, old in zip((out, lse), by_torch, before, strict=True):
        torch.testing.assert_close(found.cpu().double(), right, atol=1e-5, rtol=1e-5)
        assert torch.equal(found[:, :, :30], old[:, :, :30])
        assert torch.equal(found[:, :, 70:], old[:, :, 70:])
        assert not torch.equal(found[:, :, 30:70], old[:, :, 30:70])


@runs
def test_no_rows_are_no_launch() -> None:
    add_partial(*(torch.zeros(2, 3, 0, *dim, device=DEVICE) for dim in ((8,), (), (8,), (), (8,))))


@runs
@pytest.mark.parametrize("sets", [1, 3, 4])
@pytest.mark.parametrize(("length", "dim"), [(1, 16), (5, 40)])
def test_gathered_rows_over_all_sets_of_keys(sets: int, length: int, dim: int) -> None:
    """A row that saw no key in some sets, one that saw none at all, and one whose sums float32 exceeds as numbers."""
    made = [rows("float32", length + 3, dim, seed) for seed in range(1, sets + 1)]
    parts = torch.stack([torch.cat([out, lse[..., None]], -1) for out, lse in made])
    parts[:, :, :, -1, -1] += 1000.0
    found, wanted = launch_merge_gathered(parts), merge_gathered(parts.cpu().double())
    assert found[1][..., 0].isneginf().all()
    assert not found[0][:, :, 0].any()
    for own, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(own.cpu().double(), right, atol=2e-6, rtol=2e-6)


@runs
def test_gathered_rows_of_no_queries() -> None:
    out, lse = launch_merge_gathered(torch.zeros(2, 3, 4, 0, 9, device=DEVICE))
    assert (out.shape, lse.shape) == ((3, 4, 0, 8), (3, 4, 0))

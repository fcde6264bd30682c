"""Shares of keys are merged in any order, and the words of a tree of drafts."""

from itertools import permutations
from typing import Any

import pytest
import torch

from blocktune.kernels.portable.decode.tiles import merge_splits_kernel
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.tree_mask import tree_words
from tests.kernels.portable.decode.test_flash_decode import NINE_ROWS, NINE_TOKENS
from tests.support.triton_modes import DEVICE, runs

# Triton's interpreter turns one-element arrays into numbers, which NumPy deprecates.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


def merged(m: torch.Tensor, total: torch.Tensor, o: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Triples m, l [splits, rows] and o [splits, rows, dim] through the merge kernel: out [rows, dim], lse [rows]."""
    splits, rows, dim = o.shape
    work = torch.cat([o.flatten(), m.flatten(), total.flatten()]).to(DEVICE)
    out, lse = (torch.full(size, float("nan"), device=DEVICE) for size in ((rows, dim), (rows,)))
    merge_splits_kernel[(rows, 1)](out, lse, work, 0, 0, dim, 1, rows, rows, splits, dim, 16, False)
    return out, lse


def random_triples(splits: int, rows: int = 3, dim: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The last split saw no key, and the last row saw none in any."""
    generator = torch.Generator().manual_seed(splits)
    m = 20 * torch.randn(splits, rows, generator=generator)
    total = torch.rand(splits, rows, generator=generator) + 1
    o = torch.randn(splits, rows, dim, generator=generator)
    empty = torch.zeros(splits, rows, dtype=torch.bool)
    empty[-1], empty[:, -1] = True, True
    return m.masked_fill(empty, float("-inf")), total.masked_fill(empty, 0.0), o.masked_fill(empty[..., None], 0.0)


@runs
def test_merge_in_any_order() -> None:
    triples = random_triples(4)
    out, lse = merged(*triples)
    assert (out[-1] == 0).all()
    assert lse[-1] == float("-inf")
    for order in permutations(range(4)):
        other_out, other_lse = merged(*(part[list(order)] for part in triples))
        torch.testing.assert_close(other_out, out, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(other_lse, lse, rtol=1e-6, atol=1e-6)


@runs
def test_merge_is_associative() -> None:
    """A merged part is a triple again, of its log-sum-exp in base 2, the sum 1 and its output."""
    log2_e = 1.4426950408889634
    m, total, o = random_triples(4)
    out, lse = merged(m, total, o)
    for first in (slice(0, 2), slice(1, 3), slice(2, 4)):
        part_out, part_lse = (part.cpu() for part in merged(m[first], total[first], o[first]))
        rest = [split for split in range(4) if not first.start <= split < first.stop]
        part_sum = (~part_lse.isneginf()).float()
        triples = (
            torch.cat([m[rest], part_lse[None] * log2_e, torch.full_like(part_lse[None], float("-inf"))]),
            torch.cat([total[rest], part_sum[None], torch.zeros_like(part_sum[None])]),
            torch.cat([o[rest], part_out[None], torch.zeros_like(part_out[None])]),
        )
        other_out, other_lse = merged(*triples)
        torch.testing.assert_close(other_out, out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other_lse, lse, rtol=1e-5, atol=1e-5)


def test_tree_words_of_nine_tokens() -> None:
    words = tree_words(NINE_TOKENS)
    assert words.dtype == torch.int32
    rows = ["".join(str(int(row) >> draft & 1) for draft in range(9)) for row in words[:, 0]]
    assert rows == NINE_ROWS.split()


def test_tree_words_are_signed_and_as_many_as_needed() -> None:
    chain = tree_words([None, *range(63)])
    assert chain.shape == (64, 2)
    assert chain[31].tolist() == [-1, 0]
    assert chain[63].tolist() == [-1, -1]
    assert tree_words([None] * 33)[32].tolist() == [0, 1]


@pytest.mark.parametrize("parents", [[None, 1], [0], [None, -1], [None, 2, 0], [None, 0.0], []])
def test_tree_words_refuse_what_is_no_tree(parents: list[Any]) -> None:
    with pytest.raises(UsageError, match=r"parent|drafts"):
        tree_words(parents)

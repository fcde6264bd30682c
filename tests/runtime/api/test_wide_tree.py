"""Trees of up to 256 drafts: those beyond what kernels read bits of are computed in two parts that are merged."""

import random

import pytest
import torch
from torch import Tensor

from blocktune import UsageError, tree_attention, tree_words
from blocktune.kernels.values.tree_mask import KERNEL_DRAFTS, MAX_DRAFTS

pytestmark = pytest.mark.triton_free

HEADS, KV_HEADS, DIM, CAPACITY = 4, 2, 16, 384


def random_forest(drafts: int, seed: int) -> list[int | None]:
    dice = random.Random(seed)
    return [None if not draft or dice.random() < 0.1 else dice.randrange(draft) for draft in range(drafts)]


def ancestors(parents: list[int | None]) -> Tensor:
    """The pairs of which a draft sees the other: itself and its ancestors."""
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for draft in range(len(parents)):
        walker: int | None = draft
        while walker is not None:
            seen[draft, walker] = True
            walker = parents[walker]
    return seen


def definition(
    query: Tensor, keys: Tensor, values: Tensor, trees: list[list[int | None]], lengths: list[int]
) -> Tensor:
    rows = []
    for entry, (parents, length) in enumerate(zip(trees, lengths, strict=True)):
        group = HEADS // KV_HEADS
        key, value = (cache[entry, :length].transpose(0, 1).repeat_interleave(group, 0) for cache in (keys, values))
        before = torch.ones(len(parents), length - len(parents), dtype=torch.bool)
        mask = torch.cat([before, ancestors(parents)], 1)
        rows.append(torch.nn.functional.scaled_dot_product_attention(query[entry], key, value, mask))
    return torch.stack(rows)


@pytest.mark.parametrize("drafts", [KERNEL_DRAFTS, KERNEL_DRAFTS + 1, 100, 128, 250, MAX_DRAFTS])
@pytest.mark.parametrize("paged", [False, True])
def test_a_draft_sees_the_cache_before_and_its_ancestors(drafts: int, paged: bool) -> None:
    trees = [random_forest(drafts, seed) for seed in (1, 2, 3)]
    lengths = [CAPACITY, drafts, drafts + 17]
    query = torch.randn(3, HEADS, drafts, DIM)
    keys, values = torch.randn(2, 3, CAPACITY, KV_HEADS, DIM)
    keys[1, drafts:] = values[1, drafts:] = float("nan")  # what lies beyond the length is not read
    words = torch.stack([tree_words(parents) for parents in trees])
    given, table = (keys, values), None
    if paged:
        pages = torch.randperm(3 * CAPACITY // 64)
        table = pages.view(3, -1).to(torch.int32)
        given = tuple(torch.empty(len(pages), 64, KV_HEADS, DIM) for _ in range(2))  # type: ignore[assignment]
        for to, cache in zip(given, (keys, values), strict=True):
            to[pages] = cache.reshape(-1, 64, KV_HEADS, DIM)
    out = tree_attention(query, *given, words, torch.tensor(lengths, dtype=torch.int32), block_table=table)
    torch.testing.assert_close(out, definition(query, keys, values, trees, lengths), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("drafts", [KERNEL_DRAFTS, KERNEL_DRAFTS + 1, 100])
@pytest.mark.parametrize("paged", [False, True])
def test_an_entry_may_have_fewer_rows_than_drafts(drafts: int, paged: bool) -> None:
    """As those have that a batch does not use: the last drafts are seen, and without rows the output is 0."""
    parents, lengths = random_forest(drafts, 1), [CAPACITY, drafts - 1, 30, 0]
    query, (keys, values) = torch.randn(4, HEADS, drafts, DIM), torch.randn(2, 4, CAPACITY, KV_HEADS, DIM)
    table = torch.arange(4 * CAPACITY // 64, dtype=torch.int32).view(4, -1) if paged else None
    right = torch.zeros_like(query)
    for entry, length in enumerate(lengths[:3]):
        keys[entry, length:] = values[entry, length:] = float("nan")
        missing, seen = max(drafts - length, 0), ancestors(parents)
        own = [
            cache[entry, :length].transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0) for cache in (keys, values)
        ]
        mask = torch.cat([torch.ones(drafts, max(length - drafts, 0), dtype=torch.bool), seen[:, missing:]], 1)
        scored = torch.nn.functional.scaled_dot_product_attention(query[entry], *own, mask)
        right[entry] = scored.where(mask.any(-1, keepdim=True), 0.0)
    keys[3] = values[3] = float("nan")
    given = (keys, values)
    if table is not None:
        given = tuple(cache.reshape(-1, 64, KV_HEADS, DIM) for cache in given)  # type: ignore[assignment]
        table[3] = -1
    words = tree_words(parents).expand(4, -1, -1)
    out = tree_attention(query, *given, words, torch.tensor(lengths, dtype=torch.int32), block_table=table)
    torch.testing.assert_close(out, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("drafts", [KERNEL_DRAFTS, KERNEL_DRAFTS + 1, MAX_DRAFTS])
def test_float64_is_exact(drafts: int) -> None:
    parents, length = random_forest(drafts, 1), CAPACITY - 20
    query, cache = torch.randn(1, HEADS, drafts, DIM), torch.randn(2, 1, CAPACITY, KV_HEADS, DIM)
    query, (keys, values) = query.double(), cache.double()
    out = tree_attention(query, keys, values, tree_words(parents)[None], torch.tensor([length], dtype=torch.int32))
    torch.testing.assert_close(out, definition(query, keys, values, [parents], [length]), atol=1e-13, rtol=1e-13)


def test_bad_wide_calls_are_refused() -> None:
    drafts = 100
    query, cache = torch.randn(1, HEADS, drafts, DIM), torch.randn(1, CAPACITY, KV_HEADS, DIM)
    words = tree_words(random_forest(drafts, 1))[None]
    for length in (-1, CAPACITY + 1):
        with pytest.raises(UsageError, match="cache_seqlens"):
            tree_attention(query, cache, cache, words, torch.tensor([length], dtype=torch.int32))
    with pytest.raises(UsageError, match="1 to 256 drafts"):
        tree_words([None] * (MAX_DRAFTS + 1))

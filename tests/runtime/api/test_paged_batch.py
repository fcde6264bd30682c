"""Batches of prompts and single tokens over pages by the portable kernels, in Triton's interpreter, against float64."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune import UsageError
from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.api.cache.paged_batch import BatchAttention, PagedBatch
from blocktune.runtime.dispatch import obstacles, resolver, torch_math
from tests.support.triton_modes import INTERPRETED

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not INTERPRETED, reason="the kernels run in Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow encountered|invalid value|divide by zero):RuntimeWarning"),
]

HEADS, HEADS_KV, DIM, PAGES = 4, 2, 32, 12
SINKS = torch.tensor([-1.0, 0.5, 2.0, 0.0])
QUERIES, KEYS = (1, 1, 40, 3), (18, 5, 47, 20)
"""Two single tokens, a prompt that forward kernels take, and the end of another one."""


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch computes nothing; the kernels for Hopper leave all to portable ones in the interpreter."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        pytest.fail("no kernel served the call")

    monkeypatch.setattr(obstacles, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: device_named("h200"))
    for name in ("_attend_cache", "_attend_dense", "_attend_packed"):
        monkeypatch.setattr(torch_math, name, refuse)


def cache(size: int) -> tuple[Tensor, Tensor]:
    """Pages of keys and of values that share rows, the heads of a page one after the other."""
    torch.manual_seed(0)
    rows = torch.randn(PAGES, HEADS_KV, size, 2 * DIM, dtype=torch.float16).transpose(1, 2)
    k, v = rows.split(DIM, dim=-1)
    return k, v


def table_of(size: int, keys: Sequence[int], pages: int = PAGES) -> Tensor:
    """Pages for each sequence; those that no key is in are named -1."""
    counts = [-(-length // size) for length in keys]
    table, numbers = torch.full((len(keys), max(counts)), -1, dtype=torch.int32), torch.randperm(pages).int()
    for row, count, begin in zip(table, counts, torch.tensor([0, *counts]).cumsum(0), strict=False):
        row[:count] = numbers[begin : begin + count]
    return table


def batch_of(queries: Sequence[int], keys: Sequence[int], table: Tensor, singles: int) -> PagedBatch:
    begins = torch.tensor([0, *queries]).cumsum(0).int()
    return PagedBatch(begins, torch.tensor(keys, dtype=torch.int32), table, max(queries), singles)


def defined(q: Tensor, k: Tensor, v: Tensor, layer: BatchAttention) -> Tensor:
    """Attention of one sequence [tokens, heads, dim], whose last query sees its last key."""
    keys, values = (each.double().repeat_interleave(HEADS // HEADS_KV, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * layer.scale
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    left = layer.window[0] if layer.window[0] >= 0 else len(k)
    scores = scores.masked_fill((distance < 0) | (distance > left), float("-inf"))
    logits = torch.zeros(HEADS, 0) if layer.sinks is None else layer.sinks[:, None]
    scores = torch.cat([scores, logits[:, None].expand(-1, len(q), -1).double()], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], values)


def written(layer: BatchAttention, q: Tensor, pages: tuple[Tensor, Tensor], batch: PagedBatch) -> Tensor:
    out = torch.full_like(q, float("nan"))
    with torch.no_grad():
        assert layer.write(out, q, *pages, batch)
    return out


@pytest.mark.few(2)
@pytest.mark.parametrize("size", [16, 24])
@pytest.mark.parametrize("singles", [2, 0])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": (6, 0), "softcap": 2.0}, {"sinks": SINKS}, {"num_splits": 1}, {"num_splits": 1, "sinks": SINKS}],
    ids=str,
)
def test_a_batch_is_attention_of_each_sequence(options: dict[str, Any], singles: int, size: int) -> None:
    (k, v), table = cache(size), table_of(size, KEYS)
    layer = BatchAttention(scale=DIM**-0.5, **options)
    q = torch.randn(sum(QUERIES) + 2, HEADS, DIM, dtype=torch.float16)
    for _ in range(2):  # the second call comes by the fast path
        out = written(layer, q, (k, v), batch_of(QUERIES, KEYS, table, singles))
        for begin, queries, keys, pages in zip((0, 1, 2, 42), QUERIES, KEYS, table, strict=True):
            own = (each[pages.clamp(min=0).long()].flatten(0, 1)[:keys] for each in (k, v))
            wanted = defined(q[begin : begin + queries], *own, layer)
            torch.testing.assert_close(out[begin : begin + queries].double(), wanted, rtol=2e-3, atol=2e-3)
        assert not out[sum(QUERIES) :].any()  # after the last sequence


@pytest.mark.few(1)
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_a_row_is_equal_to_the_bit_in_every_batch(sinks: Tensor | None) -> None:
    """Each sequence alone, and with others of which a prompt grows. Merges of several splits need a GPU."""
    (k, v), table = cache(16), table_of(16, KEYS)
    layer = BatchAttention(scale=DIM**-0.5, num_splits=1, sinks=sinks)
    q = torch.randn(sum(QUERIES), HEADS, DIM, dtype=torch.float16)
    parts = q.split(QUERIES)
    alone = [
        written(layer, part, (k, v), batch_of([len(part)], [keys], row[None], int(len(part) == 1)))
        for part, keys, row in zip(parts, KEYS, table, strict=True)
    ]
    for longest in (2, 9, 10, 40):
        shorter = torch.cat([*parts[:2], parts[2][:longest], parts[3]])
        queries, keys = (1, 1, longest, 3), (*KEYS[:2], KEYS[2] - 40 + longest, KEYS[3])
        found = written(layer, shorter, (k, v), batch_of(queries, keys, table, 2)).split(queries)
        assert all(torch.equal(found[number], alone[number]) for number in (0, 1, 3))
    assert torch.equal(found[2], alone[2])


def test_what_no_kernel_serves_is_left_to_the_caller() -> None:
    """As heads of 320 columns are."""
    k, v, q = (torch.randn(*sizes, 320, dtype=torch.float16) for sizes in ((8, 16, 2), (8, 16, 2), (45, HEADS)))
    batch = batch_of(QUERIES, KEYS, torch.zeros(4, 3, dtype=torch.int32), 2)
    layer = BatchAttention(scale=DIM**-0.5)
    assert not layer.write(torch.empty_like(q), q, k, v, batch)
    assert not layer.write(torch.empty_like(q), q, k, v, replace(batch, singles=0))


def test_singles_are_some_of_the_sequences() -> None:
    with pytest.raises(UsageError, match=r"0 <= singles <= 4.* got 5"):
        batch_of(QUERIES, KEYS, table_of(16, KEYS), 5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("begins", torch.zeros(4, dtype=torch.int32)),
        ("begins", torch.zeros(5, dtype=torch.int64)),
        ("lengths", torch.zeros(4)),
        ("table", torch.zeros(3, 3, dtype=torch.int32)),
    ],
    ids=["begins of one sequence less", "begins in 64 bits", "lengths in float32", "table of one sequence less"],
)
def test_tensors_of_a_batch_fit_each_other(name: str, value: Tensor) -> None:
    batch = batch_of(QUERIES, KEYS, table_of(16, KEYS), 2)
    with pytest.raises(UsageError, match=f"`{name}` must be int32"):
        replace(batch, **{name: value})


def test_a_number_of_splits_is_one_that_kernels_have() -> None:
    assert BatchAttention(scale=1.0, num_splits=3).num_splits == 4
    for splits in (-1, 129):
        with pytest.raises(UsageError, match=r"0 <= num_splits <= 128"):
            BatchAttention(scale=1.0, num_splits=splits)

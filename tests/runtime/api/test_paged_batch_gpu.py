"""Batches of prompts and single tokens over pages on a GPU: numbers next to float64, bits, captured graphs."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune.runtime.api.cache.paged_batch import BatchAttention, PagedBatch
from tests.runtime.api.test_paged_batch import HEADS, HEADS_KV, batch_of, defined, table_of, written

pytestmark = pytest.mark.gpu

QUERIES, KEYS = (1, 1, 1, 300, 5, 129), (700, 33, 2048, 300, 900, 1500)
DIM, PAGES = 128, 400
SINKS = torch.tensor([-1.0, 0.5, 2.0, 0.0])
OPTIONS: list[dict[str, Any]] = [{}, {"window": (127, 0), "softcap": 20.0}, {"sinks": SINKS}]


def cache(size: int) -> tuple[Tensor, Tensor]:
    """Pages whose rows hold a key and a value, the heads of a page one after the other."""
    torch.manual_seed(0)
    rows = torch.randn(PAGES, HEADS_KV, size, 2 * DIM, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    k, v = rows.split(DIM, dim=-1)
    return k, v


def tables(size: int) -> Tensor:
    return table_of(size, KEYS, PAGES)


def on_gpu(queries: Sequence[int], keys: Sequence[int], table: Tensor, singles: int) -> PagedBatch:
    batch = batch_of(queries, keys, table, singles)
    return PagedBatch(batch.begins.cuda(), batch.lengths.cuda(), table.cuda(), batch.longest, singles)


def layer_of(num_splits: int = 0, **options: Any) -> BatchAttention:
    given = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in options.items()}
    return BatchAttention(scale=DIM**-0.5, num_splits=num_splits, **given)


@pytest.mark.parametrize("size", [16, 64, 48])
@pytest.mark.parametrize("splits", [0, 1, 16])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window, soft cap", "sinks"])
def test_a_batch_is_attention_of_each_sequence(options: dict[str, Any], splits: int, size: int) -> None:
    (k, v), table = cache(size), tables(size)
    q = torch.randn(sum(QUERIES) + 3, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    right = BatchAttention(scale=DIM**-0.5, **options)
    for _ in range(2):  # the second call comes by the fast path
        out = written(layer_of(splits, **options), q, (k, v), on_gpu(QUERIES, KEYS, table, 3)).cpu()
        parts = zip(q.cpu().split([*QUERIES, 3]), out.split([*QUERIES, 3]), KEYS, table, strict=False)
        for query, found, keys, pages in parts:
            own = (each[pages.clamp(min=0).long().cuda()].flatten(0, 1)[:keys].cpu() for each in (k, v))
            torch.testing.assert_close(found.double(), defined(query, *own, right), rtol=2e-2, atol=2e-2)
        assert not out[sum(QUERIES) :].any()


@pytest.mark.parametrize("splits", [1, 4, 16])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window, soft cap", "sinks"])
def test_a_row_is_equal_to_the_bit_in_every_batch(options: dict[str, Any], splits: int) -> None:
    (k, v), table, layer = cache(16), tables(16), layer_of(splits, **options)
    q = torch.randn(sum(QUERIES), HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    parts = q.split(QUERIES)
    whole = written(layer, q, (k, v), on_gpu(QUERIES, KEYS, table, 3)).split(QUERIES)
    for part, found, keys, row in zip(parts, whole, KEYS, table, strict=True):
        own = row[None, : -(-keys // 16)]  # the table is as wide as the longest sequence needs
        alone = written(layer, part, (k, v), on_gpu([len(part)], [keys], own, int(len(part) == 1)))
        assert torch.equal(alone, found)


def test_a_captured_step_reads_the_lengths_of_its_replay() -> None:
    """Fewer sequences than were captured have no keys, as engines pad them."""
    (k, v), table, layer = cache(16), tables(16), layer_of()
    q = torch.randn(len(KEYS), HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    batch = on_gpu([1] * len(KEYS), KEYS, table, len(KEYS))
    out = written(layer, q, (k, v), batch)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        assert layer.write(out, q, k, v, batch)
    shorter = (100, 33, 700, 1, 900, 0)
    batch.lengths.copy_(torch.tensor(shorter))
    graph.replay()
    right = written(layer, q, (k, v), on_gpu([1] * len(KEYS), shorter, table, len(KEYS)))
    torch.testing.assert_close(out, right, rtol=0, atol=0)
    assert not out[-1].any()

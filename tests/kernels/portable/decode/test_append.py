"""New keys and values in a cache by one kernel: what PyTorch's indexing writes, and nothing else."""

from typing import Any

import pytest
import torch

from blocktune.kernels.portable.decode.append import AppendLaunch, append_obstacle
from blocktune.runtime.api.cache.appending import positions_from
from blocktune.runtime.api.cache.rows import CacheRows
from tests.support.triton_modes import DEVICE, runs

pytestmark = pytest.mark.interpreted

Tensor = torch.Tensor


def caches(rows: int = 32, entries: int = 3, heads: int = 2, dims: tuple[int, int] = (16, 24)) -> tuple[Tensor, Tensor]:
    key, value = (torch.randn(entries, rows, heads, dim, device=DEVICE) for dim in dims)
    return key, value


def new_rows(new: int, batch: int = 3, heads: int = 2, dims: tuple[int, int] = (16, 24)) -> tuple[Tensor, Tensor]:
    """Of heads that lie before the rows in memory, as some projections leave them."""
    key, value = (torch.randn(batch, heads, new, dim, device=DEVICE).transpose(1, 2) for dim in dims)
    return key, value


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@runs
@pytest.mark.parametrize("heads", [2, 17])
@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("number", [None, 7])
def test_rows_come_after_those_that_are_there(new: int, heads: int, number: int | None) -> None:
    (k_cache, v_cache), (k, v) = caches(heads=heads), new_rows(new, heads=heads)
    lengths = int32(0, 9, 27) if number is None else int32(7, 7, 7)
    wanted = k_cache.clone(), v_cache.clone()
    for cache, rows in zip(wanted, (k, v), strict=True):
        CacheRows().write(cache, rows, positions_from(lengths, new))
    after = torch.empty_like(lengths)
    AppendLaunch(32, 0)(k_cache, v_cache, k, v, lengths if number is None else None, None, after, number or 0)
    assert torch.equal(k_cache, wanted[0])
    assert torch.equal(v_cache, wanted[1])
    assert torch.equal(after, lengths + new)


@runs
def test_rows_of_pages_and_over_their_ends() -> None:
    (k_cache, v_cache), (k, v) = caches(rows=16, entries=9), new_rows(5)
    lengths, table = int32(0, 14, 30), int32([3, 0, 8], [5, 1, 7], [2, 6, 4])
    wanted = k_cache.clone(), v_cache.clone()
    for cache, rows in zip(wanted, (k, v), strict=True):
        CacheRows(table=table).write(cache, rows, positions_from(lengths, 5))
    after = torch.empty_like(lengths)
    AppendLaunch(48, 16)(k_cache, v_cache, k, v, lengths, table, after, 0)
    assert torch.equal(k_cache, wanted[0])
    assert torch.equal(v_cache, wanted[1])
    assert torch.equal(after, lengths + 5)


@runs
def test_rows_that_the_cache_has_no_room_for_are_not_written() -> None:
    (k_cache, v_cache), (k, v) = caches(rows=8), new_rows(3)
    before = k_cache.clone()
    AppendLaunch(8, 0)(k_cache, v_cache, k, v, int32(6, 100, -9), None, int32(0, 0, 0), 0)
    assert torch.equal(k_cache[0, 6:], k[0, :2])
    assert torch.equal(k_cache[0, :6], before[0, :6])
    assert torch.equal(k_cache[1:], before[1:])


def test_what_the_kernel_cannot_append_is_said() -> None:
    (k_cache, v_cache), (k, v) = caches(), new_rows(2)
    assert append_obstacle(k_cache, v_cache, k, v) is None
    assert "data type" in str(append_obstacle(k_cache.half(), v_cache, k, v))
    assert "heads" in str(append_obstacle(k_cache, v_cache, k, k))
    assert "contiguous" in str(append_obstacle(k_cache.mT.contiguous().mT, v_cache, k, v))
    assert "batches or lengths" in str(append_obstacle(k_cache, v_cache, k[:, :1], v))

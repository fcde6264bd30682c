"""Where the keys of a call lie in a cache: entries that an index picks, rows after a left padding, pages."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.dispatch.call_checks import check_dimensions

LARGEST_PAGE = 256
"""Of the pages that a contiguous cache is taken for: the most keys of a page that a kernel reads."""


@dataclass(frozen=True, slots=True)
class CacheRows:
    """The places of a call's keys. A cache is [entries, rows, heads, dim], or pages [pages, page_size, heads, dim].

    index: int32 [batch], the cache's entry of each batch entry; None is the one with its number. padding: int32
    [batch], rows at the beginning of an entry that hold no key. table: int32 [batch, max_pages], the pages of each
    batch entry; with a table there is neither of the others.
    """

    index: Tensor | None = None
    padding: Tensor | None = None
    table: Tensor | None = None

    @classmethod
    def of(cls, q: Tensor, index: Tensor | None, padding: Tensor | None, table: Tensor | None) -> Self:
        """Return the places that arguments of flash_attn_with_kvcache name; q is [batch, ...].

        Raises:
            UsageError: an argument is no int32 tensor of its shape on the query's device, or pages come with another.
        """
        for name, given in (("cache_batch_idx", index), ("cache_leftpad", padding)):
            if given is not None:
                _check_integers(name, given, q)
        if table is None:
            return cls(index, padding)
        if index is not None or padding is not None:
            name = "cache_batch_idx" if index is not None else "cache_leftpad"
            raise UsageError(
                f"`{name}` and `block_table` exclude each other, but both are given. Let the table name the pages."
            )
        check_dimensions("[batch, max_pages]", block_table=table)
        if table.dtype != torch.int32 or table.shape[0] != q.shape[0]:
            raise UsageError(
                f"`block_table` must be int32 [batch, max_pages] with batch {q.shape[0]}, but got {table.dtype} "
                f"{tuple(table.shape)}. Convert it, or give a row for every sequence."
            )
        return cls(table=table)

    def capacity(self, cache: Tensor) -> int:
        """Return how many keys an entry has room for, those of a padding among them."""
        rows: int = cache.shape[1] if self.table is None else self.table.shape[1] * cache.shape[1]
        return rows

    def entries(self, batch: int, device: torch.device) -> Tensor:
        """Return the cache's entry of each batch entry, int64 [batch]."""
        return torch.arange(batch, device=device) if self.index is None else self.index.long()

    def write(self, cache: Tensor, new: Tensor, positions: Tensor) -> None:
        """Write new rows [batch, new, heads, dim] to positions int64 [batch, new], counted from the first row of each
        entry."""
        if self.table is None:
            cache[self.entries(new.shape[0], new.device)[:, None], positions] = new
        else:
            pages = self.table.long().gather(1, positions // cache.shape[1])
            cache[pages, positions % cache.shape[1]] = new

    def as_pages(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the caches and the block table with which kernels find the keys.

        Entries of a contiguous cache that an index or a padding picks become pages, and pages of a size that no kernel
        reads become several: the largest ones that divide them, single rows after a padding, which begins anywhere.
        Nothing is copied of caches whose entries follow each other in memory.
        """
        rows = k_cache.shape[1]
        size = 1 if self.padding is not None else min(rows & -rows, LARGEST_PAGE)
        as_they_are = self.index is None and self.padding is None and (self.table is None or rows == size)
        if as_they_are or not rows:
            return k_cache, v_cache, self.table
        count = rows // size
        k_pages, v_pages = (cache.unflatten(1, (count, size)).flatten(0, 1) for cache in (k_cache, v_cache))
        return k_pages, v_pages, self._table_of(count, k_cache.device)

    def _table_of(self, count: int, device: torch.device) -> Tensor:
        """Return the block table, int32, where a cache's entries or pages are made of `count` pages each."""
        parts = torch.arange(count, device=device)
        if self.table is not None:
            return (self.table.long()[..., None] * count + parts).flatten(1).int()
        given = self.index if self.index is not None else self.padding
        assert given is not None  # else there is no table
        if self.padding is not None:
            parts = (parts + self.padding.long()[:, None]).clamp(max=count - 1)  # after the last key anything will do
        return (self.entries(given.shape[0], device)[:, None] * count + parts).int()


def _check_integers(name: str, given: Tensor, q: Tensor) -> None:
    """Check an argument of integers.

    Raises:
        UsageError: it is not int32 [batch] on the query's device.
    """
    check_dimensions("[batch]", **{name: given})
    if given.dtype != torch.int32 or given.shape[0] != q.shape[0]:
        raise UsageError(
            f"`{name}` must be int32 [batch] with batch {q.shape[0]}, but got {given.dtype} {tuple(given.shape)}. "
            f"Convert it with {name}.to(torch.int32)."
        )
    if given.device != q.device:
        raise UsageError(f"`{name}` must be on the device of q, but got {given.device} and {q.device}. Move it there.")

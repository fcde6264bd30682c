"""The cache of a case: where its keys lie, and how queries and new keys are turned."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from tools.differential.cases.case import Case
from tools.differential.cases.tensors import placed

SPARE = 2
"""Entries of a cache that no index picks, and rows that a slice of it leaves out."""
MOST_PADDING = 5
UNREAD = 7.0
"""What stands where no key is, before the call."""


@dataclass(frozen=True, slots=True)
class Cache:
    """lengths, padding: int64 [batch], rows of every entry that are filled, those of the padding among them, and the
    rows of that. pages: those of every entry; table, index: as the call gets them. angles: float64 [positions, width /
    2], already rounded."""

    case: Case
    lengths: Tensor
    padding: Tensor
    pages: Tensor | None
    table: Tensor | None
    index: Tensor | None
    angles: Tensor | None

    @classmethod
    def of(cls, case: Case, device: torch.device) -> Self:
        """That of a case, the same one for the same case on the same kind of device."""
        kind, generator = case.kind, torch.Generator(device).manual_seed(case.seed + 1)

        def shuffled(count: int) -> Tensor:
            return torch.randperm(count, generator=generator, device=device)

        count = case.seqlen_k // kind.page_size if kind.page_size else 0
        pages = shuffled(case.batch * count).view(case.batch, count).int() if count else None
        index = shuffled(case.batch + SPARE)[: case.batch].int() if kind.picked else None
        padding = shuffled(MOST_PADDING * case.batch)[: case.batch] // case.batch if kind.padded else None
        padding = torch.zeros(case.batch, dtype=torch.int64, device=device) if padding is None else padding
        angles = None
        if case.rotary:
            positions = case.seqlen_k + MOST_PADDING + case.seqlen_q
            angles = torch.rand(positions, case.rotary // 2, generator=generator, device=device).double() * 6.0
        lengths = torch.tensor(case.cached, device=device) + padding
        table = None
        if pages is not None:
            pages[:, : _shared_rows(case) // kind.page_size] = pages[:1, : _shared_rows(case) // kind.page_size]
            table = table_of(pages, lengths + case.appended, case)
        return cls(case, lengths, padding, pages, table, index, angles)

    def arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """What the call gets besides queries, caches and new rows, of a computation in this type."""
        lengths = self.case.cached[0] if self.case.one_length else self.lengths.int()
        given: dict[str, Any] = {"cache_seqlens": lengths, "block_table": self.table}
        given["cache_batch_idx"] = self.index
        if self.case.kind.padded:
            given["cache_leftpad"] = self.padding.int()
        if self.angles is not None:
            cos, sin = self.angles.cos().to(dtype), self.angles.sin().to(dtype)
            given |= {"rotary_cos": cos, "rotary_sin": sin}
        given = {name: placed(own, self.case) if isinstance(own, Tensor) else own for name, own in given.items()}
        return given | {"num_splits": self.case.num_splits, "rotary_interleaved": self.case.interleaved}

    def shared(self, keys: Tensor) -> Tensor:
        """These keys or values [batch, heads, rows, columns], with those of the first entry in pages that all have."""
        count = _shared_rows(self.case)
        return torch.cat((keys[:1, :, :count].expand(len(keys), -1, -1, -1), keys[:, :, count:]), 2) if count else keys

    def filled(self, keys: Tensor) -> Tensor:
        """The cache with these keys or values [batch, heads, rows, columns], without those that the call appends."""
        rows = keys.transpose(1, 2)
        if self.case.appended:
            new = self.new_places()
            rows = rows.clone()
            rows[torch.arange(len(new), device=rows.device)[:, None], new] = rows.new_full((), UNREAD)
        return self.placed(rows)

    def sliced(self, cache: Tensor) -> Tensor:
        """The cache, if the case says so as a part of the rows of a longer one."""
        if not self.case.sliced:
            return cache
        longer = cache.new_zeros(cache.shape[0], cache.shape[1] + SPARE, *cache.shape[2:])
        part = longer[:, : cache.shape[1]]
        return part.copy_(cache)

    def placed(self, rows: Tensor) -> Tensor:
        """Rows [batch, rows, heads, columns] where the cache has them."""
        if self.pages is not None:
            cache = torch.empty_like(rows.unflatten(1, (-1, self.case.kind.page_size)).flatten(0, 1))
            cache[self.pages.long().flatten()] = rows.unflatten(1, (-1, self.case.kind.page_size)).flatten(0, 1)
            return cache
        if self.index is None and not self.case.kind.padded:
            return rows
        return self._move_rows(rows)

    def _move_rows(self, rows: Tensor) -> Tensor:
        """Rows [batch, rows, heads, columns] in the entries of the index, after the padding."""
        batch, count, *rest = rows.shape
        entries = torch.arange(batch, device=rows.device) if self.index is None else self.index.long()
        cache = rows.new_full((batch + (0 if self.index is None else SPARE), count + MOST_PADDING, *rest), UNREAD)
        places = self.padding[:, None] + torch.arange(count, device=rows.device)
        cache[entries[:, None], places] = rows
        return cache

    def new_places(self) -> Tensor:
        """[batch, appended], which of its own keys each entry's new ones are."""
        first = self.lengths - self.padding
        return first[:, None] + torch.arange(self.case.appended, device=first.device)

    def turned(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key [batch, heads, rows, columns] as they take part: turned in float64, and rounded to the type."""
        if self.angles is None:
            return query, key
        rows = torch.arange(query.shape[2], device=query.device)
        is_moved = self.table is None and (self.index is not None or self.case.kind.padded)
        capacity = key.shape[2] + is_moved * MOST_PADDING
        told_apart = self.case.kind.causal or any(0 <= side < capacity for side in self.case.window)
        query = self._rotate(query, self.lengths[:, None] + (rows if told_apart else rows * 0))
        every = torch.arange(key.shape[2], device=key.device)
        new = self.new_places()
        is_new = (every >= new[:, :1]) & (every <= new[:, -1:])
        turned = self._rotate(key, (every + self.padding[:, None]))
        return query, torch.where(is_new[:, None, :, None], turned, key)

    def _rotate(self, tensor: Tensor, positions: Tensor) -> Tensor:
        """The first numbers of every row as complex ones, times those of the angles of positions [batch, rows]."""
        assert self.angles is not None
        cos, sin = (own.to(tensor.dtype).double() for own in (self.angles.cos(), self.angles.sin()))
        unit = torch.complex(cos, sin)[positions][:, None]
        width = self.case.rotary
        head, rest = tensor[..., :width].double(), tensor[..., width:]
        pairs = head.unflatten(-1, (-1, 2)) if self.case.interleaved else head.unflatten(-1, (2, -1)).mT
        product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * unit)
        product = product.flatten(-2) if self.case.interleaved else product.mT.flatten(-2)
        return torch.cat((product.to(tensor.dtype), rest), -1)


def table_of(pages: Tensor, lengths: Tensor, case: Case) -> Tensor:
    """The block table as a call gets it: something else where an entry of this length needs no page."""
    strange = {"minus": -1, "beyond": pages.numel(), "largest": 2**31 - 1}
    if case.unused not in strange:
        return pages
    places = torch.arange(pages.shape[1], device=pages.device) * case.kind.page_size
    return pages.masked_fill(places >= lengths[:, None], strange[case.unused])


def _shared_rows(case: Case) -> int:
    """How many rows lie in pages that belong to all entries: whole pages, to which nothing is appended."""
    page = case.kind.page_size
    return min(case.cached) // page * page if case.shared else 0

"""The cache of a case whose keys and values have 8 bits."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from blocktune.kernels.values.short_numbers import quantize
from tools.differential.cases.caches import Cache
from tools.differential.cases.case import Case
from tools.differential.cases.classes import NO_SCALES

LEAST, MOST = -6, -3
"""Of the logarithms of scales. They are powers of two, so that the computation's type holds what 8 bits stand for."""


@dataclass(frozen=True, slots=True)
class ShortCache:
    """given: the scales of keys and of values as the call gets them, if any. own: those of every row, float32 [batch,
    rows, heads, 1], and placed: as the cache has its rows."""

    dtype: torch.dtype
    given: tuple[Tensor, Tensor] | None
    own: tuple[Tensor, Tensor]
    placed: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, case: Case, cache: Cache, device: torch.device) -> Self:
        """That of a case, the same one for the same case on the same kind of device."""
        generator, kind = torch.Generator(device).manual_seed(case.seed + 2), case.kind
        full = case.batch, case.seqlen_k, kind.heads_kv
        sizes = {NO_SCALES: (), "number": (), "heads": full[2:], "batch": (case.batch, kind.heads_kv), "tokens": full}
        size, absent = sizes[kind.scales], kind.scales == NO_SCALES
        exponents = [torch.randint(LEAST, MOST + 1, size, generator=generator, device=device) for _ in range(2)]
        scales = [torch.exp2(own.float() * (not absent)) for own in exponents]
        own = [(scale[:, None] if kind.scales == "batch" else scale).expand(full)[..., None] for scale in scales]
        placed = [cache.placed(each) for each in own]
        given = _pair([each[..., 0] for each in placed] if kind.scales == "tokens" else scales)
        return cls(getattr(torch, kind.cache_type), None if absent else given, _pair(own), _pair(placed))

    def arguments(self) -> dict[str, Any]:
        """What the call gets besides."""
        return {} if self.given is None else dict(zip(("k_descale", "v_descale"), self.given, strict=True))

    def read(self, *rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, heads, rows, columns] as the nearest numbers that 8 bits stand for."""
        scales = (own.transpose(1, 2) for own in self.own)
        pairs = zip(rows, scales, strict=True)
        return _pair([(quantize(each, scale, self.dtype).float() * scale).to(each.dtype) for each, scale in pairs])

    def stored(self, *caches: Tensor) -> list[Tensor]:
        """Caches of such numbers, in 8 bits."""
        return [quantize(cache, scale, self.dtype) for cache, scale in zip(caches, self.placed, strict=True)]


def _pair(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    keys, values = tensors
    return keys, values

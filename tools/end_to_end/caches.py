"""Attention over a cache of keys and values, as our package and as PyTorch's function serve it."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from blocktune.runtime.api.kv_cache import flash_attn_with_kvcache
from tools.end_to_end.llama import LlamaSizes


class OurCache:
    """`flash_attn_with_kvcache`, which writes the new rows, too. Caches [1, capacity, num_heads_kv, head_dim]."""

    def __init__(self, sizes: LlamaSizes, device: torch.device, dtype: torch.dtype) -> None:
        self._keys, self._values = _fill(sizes, device, dtype)
        self._length = torch.zeros(1, dtype=torch.int32, device=device)

    def begin(self, position: int) -> None:
        self._length.fill_(position - 1)

    def next_step(self) -> None:
        self._length += 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        new = key[None, None], value[None, None]
        return flash_attn_with_kvcache(query[None, None], keys, values, *new, cache_seqlens=self._length)


class SdpaCache:
    """PyTorch's function with a mask of what is filled. Caches [1, num_heads_kv, capacity, head_dim].

    Args:
        sizes: of the model and the cache.
        device: where the cache is.
        dtype: of the cache.
        sliced: whether the filled part of the cache is cut out instead, which a captured graph cannot follow.
    """

    def __init__(self, sizes: LlamaSizes, device: torch.device, dtype: torch.dtype, *, sliced: bool) -> None:
        keys, values = _fill(sizes, device, dtype)
        self._keys = [cache.transpose(1, 2).contiguous() for cache in keys]
        self._values = [cache.transpose(1, 2).contiguous() for cache in values]
        self._places = torch.arange(sizes.capacity, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._sliced, self._filled = sliced, 0
        self._mask: Tensor | None = None

    def begin(self, position: int) -> None:
        self._position.fill_(position - 1)
        self._filled = position

    def next_step(self) -> None:
        self._position += 1
        self._filled += 1
        self._mask = None if self._sliced else (self._places <= self._position)[None, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(2, self._position, key[None, :, None])
        values.index_copy_(2, self._position, value[None, :, None])
        if self._sliced:
            keys, values = keys[:, :, : self._filled], values[:, :, : self._filled]
        return scaled_dot_product_attention(query[None, :, None], keys, values, self._mask, enable_gqa=True)


def _fill(sizes: LlamaSizes, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return keys and values of all layers, the same in every cache."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (1, sizes.capacity, sizes.num_heads_kv, sizes.head_dim)

    def drawn() -> list[Tensor]:
        return [
            torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
            for _ in range(sizes.layers)
        ]

    return drawn(), drawn()

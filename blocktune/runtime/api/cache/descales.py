"""The scales of caches with 8-bit keys and values, as FlashAttention-3 names them: k_descale and v_descale."""

from dataclasses import dataclass
from typing import Self, TypeAlias

import torch
from torch import Tensor

from blocktune.kernels.values.errors import UsageError, WrongTypeError
from blocktune.kernels.values.short_numbers import CACHE_TYPES, quantize
from blocktune.runtime.api.cache.rows import CacheRows

Descale: TypeAlias = Tensor | float | None


@dataclass(frozen=True, slots=True)
class Descales:
    """The factors of the numbers in an 8-bit cache: float32 [batch or 1, num_heads_kv or 1], or of tokens [entries or
    pages, rows, num_heads_kv], both or neither; None is 1."""

    k: Tensor | None
    v: Tensor | None

    @classmethod
    def of(
        cls, q: Tensor, k_cache: Tensor, v_cache: Tensor, k_descale: Tensor | None, v_descale: Tensor | None
    ) -> Self | None:
        """Return the scales of a call; None where the cache is not of 8 bits.

        Raises:
            UsageError: a scale has another type, shape or device, is missing, or the cache is not of 8 bits.
        """
        if k_cache.dtype not in CACHE_TYPES or k_cache.dtype is q.dtype:
            if k_descale is not None or v_descale is not None:
                raise UsageError(
                    f"`k_descale` and `v_descale` need a cache of {_types()} and queries with more bits, but got a "
                    f"cache of {k_cache.dtype} and queries of {q.dtype}. Leave them out."
                )
            return None
        found = cls(_scale("k_descale", k_descale, q, k_cache), _scale("v_descale", v_descale, q, v_cache))
        if found.of_tokens and not (_is_of_tokens(found.k) and _is_of_tokens(found.v)):
            raise UsageError(
                "`k_descale` and `v_descale` must both have a scale per token, or neither, but only one of them has. "
                f"Expand the other one to {tuple(k_cache.shape[:3])}."
            )
        return found

    @property
    def of_tokens(self) -> bool:
        """Whether every token of a head has scales of its own."""
        return _is_of_tokens(self.k) or _is_of_tokens(self.v)

    def check(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Check the data types and devices of q [batch, num_heads, seqlen_q, head_dim] and caches.

        Raises:
            UsageError: they do not go together.
        """
        if v_cache.dtype != k_cache.dtype or not q.is_floating_point():
            raise UsageError(
                "Under floating-point queries, the keys and values of an 8-bit cache must have one type, but got "
                f"{k_cache.dtype}, {v_cache.dtype} and queries of {q.dtype}. Convert them."
            )
        if k_cache.device != q.device or v_cache.device != q.device:
            raise UsageError(
                f"q and its caches must be on one device, but got {q.device}, {k_cache.device} and {v_cache.device}. "
                "Move them."
            )

    def as_pages(self, rows: CacheRows) -> Self:
        """Return the scales as the kernels find those of tokens: where `rows` makes pages of the cache, in pages."""
        if self.k is None or self.v is None or not self.of_tokens:
            return self
        k, v, _ = rows.as_pages(self.k, self.v)
        return type(self)(k, v)

    def check_new(self, new: tuple[Tensor, Tensor], q: Tensor) -> None:
        """Check that new keys and values can be appended.

        Raises:
            UsageError: they are not of the queries' type, or tokens have scales of their own.
        """
        if self.of_tokens:
            raise UsageError(
                "No rows can be appended to a cache with a scale per token, since only the caller knows their scales. "
                "Write k / k_descale, v / v_descale and the scales into the cache, and call without k and v."
            )
        if any(rows.dtype != q.dtype for rows in new):
            raise UsageError(
                f"`k` and `v` must have the type of q, {q.dtype}, since they are rounded into the cache, but got "
                f"{new[0].dtype} and {new[1].dtype}. Convert them."
            )

    def shortened(self, new: tuple[Tensor, Tensor], caches: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return new keys and values [batch, new, num_heads_kv, dim] as the caches have them."""
        found = (
            quantize(rows, 1.0 if scale is None else scale[:, None, :, None], cache.dtype)
            for rows, scale, cache in zip(new, (self.k, self.v), caches, strict=True)
        )
        k, v = found
        return k, v


def tensor_of(name: str, descale: Descale, q: Tensor) -> Tensor | None:
    """Return a scale as a tensor on the device of q, filled with it where it is a number.

    Raises:
        WrongTypeError: it is neither.
    """
    if descale is None or isinstance(descale, Tensor):
        return descale
    if isinstance(descale, bool) or not isinstance(descale, (int, float)):
        raise WrongTypeError(
            f"`{name}` must be a float32 tensor or a number, but got {type(descale).__name__}. Convert it."
        )
    return torch.full((), float(descale), dtype=torch.float32, device=q.device)


def as_kernels_take(scale: Tensor) -> Tensor:
    """Return a scale with two dimensions if it is one per head, or three if it is one per token."""
    return scale if scale.dim() >= 2 else scale.reshape(1, -1)


def _scale(name: str, scale: Tensor | None, q: Tensor, cache: Tensor) -> Tensor | None:
    """Return the scale as `Descales` has it.

    Args:
        q: [batch, seqlen_q, num_heads, head_dim].
        cache: [entries or pages, rows, num_heads_kv, dim].

    Raises:
        UsageError: it is no float32 tensor of one of the shapes on the device of q, or none of an int8 cache.
    """
    if scale is None:
        if cache.dtype is torch.int8:
            raise UsageError(
                f"An int8 cache needs `{name}`, but got None. Pass the number or tensor that its values were divided "
                "by."
            )
        return None
    batch, heads = q.shape[0], cache.shape[2]
    shapes = (), (heads,), (batch, heads), tuple(cache.shape[:3])
    if scale.dtype is not torch.float32 or tuple(scale.shape) not in shapes:
        raise UsageError(
            f"`{name}` must be a number, or a float32 tensor [num_heads_kv], [batch, num_heads_kv] or, with a scale "
            f"per token, [entries or pages, rows, num_heads_kv], here {shapes[1:]}, but got {scale.dtype} "
            f"{tuple(scale.shape)}. Reshape it."
        )
    if scale.device != q.device:
        raise UsageError(f"`{name}` must be on the device of q, but got {scale.device} and {q.device}. Move it.")
    return as_kernels_take(scale)


def _is_of_tokens(scale: Tensor | None) -> bool:
    return scale is not None and scale.dim() == 3


def _types() -> str:
    return " or ".join(str(dtype) for dtype in CACHE_TYPES)

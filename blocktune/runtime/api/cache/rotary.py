"""Rotary position embeddings (RoFormer, arXiv 2104.09864) as flash-attention applies them over a cache."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.dispatch.call_checks import check_dimensions


@dataclass(frozen=True, slots=True)
class Rotary:
    """Angles by position: cos and sin [positions, width / 2], which turn the first `width` numbers of a head.

    interleaved: numbers 0 and 1, 2 and 3, ... are turned together; else number i and number i + width / 2.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @classmethod
    def of(
        cls, cos: Tensor | None, sin: Tensor | None, interleaved: bool, q: Tensor, new: Tensor | None, capacity: int
    ) -> Self | None:
        """Return the rotation of a call with q and new keys [batch, rows, heads, dim] over a cache of this capacity;
        None without one.

        Raises:
            UsageError: an argument is missing, has another type, shape or device, or too few positions.
        """
        if cos is None and sin is None:
            return None
        if cos is None or sin is None:
            raise UsageError("`rotary_cos` and `rotary_sin` are given together, but one is missing. Give both or none.")
        if new is None:
            raise UsageError(
                "`rotary_cos` rotates the queries and the appended keys, but got no new keys. Pass k and v, or rotate "
                "the queries before the call."
            )
        _check_angles(cos, sin, q)
        needed = capacity + max(0, q.shape[1] - new.shape[1])
        if cos.shape[0] < needed:
            raise UsageError(
                f"`rotary_cos` must have a row for every position, {needed} here, but got {cos.shape[0]}. Make it "
                "longer, or the cache shorter."
            )
        return cls(cos, sin, bool(interleaved))

    def turned(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return rows [batch, rows, heads, dim], turned by the angles of positions int64 [batch, rows or 1]; computed
        in float32."""
        half = self.cos.shape[1]
        cos, sin = (angles[positions][:, :, None].float() for angles in (self.cos, self.sin))
        head, rest = rows[..., : 2 * half].float(), rows[..., 2 * half :]
        if self.interleaved:
            first, second = head[..., 0::2], head[..., 1::2]
            turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)
        else:
            first, second = head[..., :half], head[..., half:]
            turned = torch.cat((first * cos - second * sin, first * sin + second * cos), -1)
        return torch.cat((turned.to(rows.dtype), rest), -1)


def _check_angles(cos: Tensor, sin: Tensor, q: Tensor) -> None:
    """Check the angles of a call.

    Raises:
        UsageError: they differ in shape, do not fit the queries, or are of another type or on another device.
    """
    check_dimensions("[positions, width / 2]", rotary_cos=cos, rotary_sin=sin)
    if cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[3]:
        raise UsageError(
            f"`rotary_cos` and `rotary_sin` must be [positions, width / 2] with width <= head_dim {q.shape[3]}, but "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}. Give an angle for every pair of numbers."
        )
    for name, angles in (("rotary_cos", cos), ("rotary_sin", sin)):
        if angles.dtype != q.dtype or angles.device != q.device:
            raise UsageError(
                f"`{name}` must be {q.dtype} on {q.device} as q is, but got {angles.dtype} on {angles.device}. "
                "Convert or move it."
            )

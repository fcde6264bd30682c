"""Heads whose dimension 8 does not divide, in copies with zeros up to the next multiple.

Rows of such heads begin at odd addresses: kernels load them two bytes at a time, and Hopper's copy engine reads none. A
copy takes as long as a few per cent of attention; PyTorch's own attention makes one too, and returns a view of the
padded output as well.
"""

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.fast_path import BoundCall
from blocktune.runtime.dispatch.launches.layout import Layout
from blocktune.runtime.dispatch.torch_attention import HALVES

MULTIPLE = 8
LARGEST = 256
"""The largest head dimension that the fast kernels take."""


def needs_padding(query: Tensor, value: Tensor, call: Call) -> bool:
    """Return whether a call is computed from copies with zeros."""
    dims = query.shape[3], value.shape[3]
    is_dense = call.lengths is None and not call.features.varlen and not call.features.cached
    return is_dense and query.dtype in HALVES and max(dims) <= LARGEST and any(dim % MULTIPLE for dim in dims)


def padded(tensor: Tensor) -> Tensor:
    """Return [batch, heads, length, dim] with columns of zeros up to a multiple of 8, in the same order of
    dimensions; differentiable."""
    missing = -tensor.shape[3] % MULTIPLE
    if not missing:
        return tensor
    order = sorted(range(3), key=tensor.stride, reverse=True)
    places = [order.index(dimension) for dimension in range(3)]
    return pad(tensor.permute(*order, 3), (0, missing)).permute(*places, 3)


class PaddedCall:
    """Calls of one kind that are computed from copies with zeros.

    Args:
        bound: computes the calls of the copies.
        layout: of query, key, value and output.
    """

    __slots__ = ("_bound", "_layout", "drops")

    def __init__(self, bound: BoundCall, layout: Layout = Layout.HEADS_FIRST) -> None:
        self._bound, self._layout, self.drops = bound, layout, bound.drops

    def with_layout(self, layout: Layout) -> "PaddedCall":
        """Return the same calls with tensors of another layout."""
        return PaddedCall(self._bound, layout)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor, **call_values: Any
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = self._layout.to_heads_first(query, key, value)
        out, sums = self._bound(padded(query), padded(key), padded(value), *tensors, **call_values)
        return self._layout.from_heads_first(out[..., : value.shape[3]]), sums

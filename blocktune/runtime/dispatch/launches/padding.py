"""Heads of a dimension that the fast kernels do not take, in copies with zeros up to one that they do.

Rows of heads that 8 does not divide begin at odd addresses: kernels load them two bytes at a time, and Hopper's copy
engine reads none. Heads of fewer than 16 columns have no kernel here. A copy takes as long as a few per cent of
attention; PyTorch's own attention makes one too, and returns a view of the padded output as well.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocktune.kernels.base.kernel import MAX_HEAD_DIM, MIN_HEAD_DIM
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.fast_path import BoundCall
from blocktune.runtime.dispatch.launches.launch_trial import on_its_device
from blocktune.runtime.dispatch.launches.layout import Layout
from blocktune.runtime.dispatch.obstacles import needs_gradients
from blocktune.runtime.dispatch.torch_attention import HALVES

MULTIPLE = 8

Triple = tuple[Tensor, Tensor, Tensor]
MakeCopies = Callable[[Tensor, Tensor, Tensor], Triple]


class Padding(NamedTuple):
    """Copies of query, key and value. widths: their columns, of query and key, and of values. length_first: copies are
    [batch, length, heads, columns] in memory, otherwise [batch, heads, length, columns]."""

    widths: tuple[int, int]
    length_first: bool

    def copies(self, query: Tensor, key: Tensor, value: Tensor) -> Triple:
        """Return the copies, which are differentiable; a tensor that is wide enough as it is."""
        width, width_v = self.widths
        return self._copy(query, width), self._copy(key, width), self._copy(value, width_v)

    def _copy(self, tensor: Tensor, width: int) -> Tensor:
        missing = width - tensor.shape[3]
        if not missing:
            return tensor
        if not self.length_first:
            return pad(tensor, (0, missing)).contiguous()
        return pad(tensor.transpose(1, 2), (0, missing)).contiguous().transpose(1, 2)


def padding_of(query: Tensor, value: Tensor, call: Call) -> Padding | None:
    """Return the copies that a call is computed from; None where it takes none."""
    dims = query.shape[3], value.shape[3]
    is_dense = call.lengths is None and not call.features.varlen and not call.features.cached
    if not is_dense or query.dtype not in HALVES or not 0 < min(dims) <= max(dims) <= MAX_HEAD_DIM:
        return None
    if max(dims) < MIN_HEAD_DIM and not call.features.names - {"dropout", "deterministic"}:
        return None  # PyTorch has kernels of fewer columns
    width, width_v = (max(MIN_HEAD_DIM, -(-dim // MULTIPLE) * MULTIPLE) for dim in dims)
    if (width, width_v) == dims:
        return None
    return Padding((width, width_v), query.stride(2) > query.stride(1))


class PaddedCall:
    """Calls of one kind that are computed from copies with zeros.

    Args:
        bound: computes the calls of the copies.
        copies: makes them of tensors [batch, heads, length, dim].
        layout: of query, key, value and output.
    """

    __slots__ = ("_bound", "_copies", "_layout", "drops")

    def __init__(self, bound: BoundCall, copies: MakeCopies, layout: Layout = Layout.HEADS_FIRST) -> None:
        self._bound, self._copies, self._layout, self.drops = bound, copies, layout, bound.drops

    def with_layout(self, layout: Layout) -> "PaddedCall":
        """Return the same calls with tensors of another layout."""
        return PaddedCall(self._bound, self._copies, layout)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor, **call_values: Any
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = self._layout.to_heads_first(query, key, value)
        out, sums = self._bound(*self._copies(query, key, value), *tensors, **call_values)
        return self._layout.from_heads_first(out[..., : value.shape[3]]), sums


def copies_of_kind(padding: Padding, query: Tensor, key: Tensor, value: Tensor) -> MakeCopies:
    """Return what copies tensors like these: one launch on a GPU, which is made once here. The next one may be captured
    in a CUDA graph, where no kernel can be loaded."""
    if query.device.type != "cuda" or any(tensor.stride(3) != 1 for tensor in (query, key, value)):
        return padding.copies
    copies = LaunchedCopies(padding, query, key, value)
    copies(query, key, value)
    if not needs_gradients(query, key, value):
        return copies
    return lambda *tensors: PadRows.apply(copies, *tensors)


class LaunchedCopies:
    """Copies of tensors of one kind by one launch, without gradients.

    Args:
        padding: says what is copied.
        query, key, value: tensors of the kind, with contiguous rows.
    """

    __slots__ = ("_launch", "_strides")

    def __init__(self, padding: Padding, query: Tensor, key: Tensor, value: Tensor) -> None:
        from blocktune.kernels.portable.forward.row_copies import pad_rows_launch

        width, width_v = padding.widths
        launch = pad_rows_launch(query, key, value, padding.widths, length_first=padding.length_first)
        self._launch = on_its_device(launch, query.device.index)
        self._strides = [
            _contiguous(tensor, columns, length_first=padding.length_first)
            for tensor, columns in ((query, width), (key, width), (value, width_v))
        ]

    def __call__(self, *tensors: Tensor) -> Triple:
        query, key, value = (
            tensor if sizes is None else torch.empty_strided(*sizes, dtype=tensor.dtype, device=tensor.device)
            for tensor, sizes in zip(tensors, self._strides, strict=True)
        )
        self._launch(*tensors, query, key, value)
        return query, key, value


def _contiguous(tensor: Tensor, columns: int, *, length_first: bool) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return sizes and strides of a copy of a tensor [batch, heads, length, dim]; None where it is wide enough."""
    batch, heads, length, dim = tensor.shape
    if dim == columns:
        return None
    step, between = (heads * columns, columns) if length_first else (columns, length * columns)
    return (batch, heads, length, columns), (heads * length * columns, between, step, 1)


class PadRows(torch.autograd.Function):  # type: ignore[misc]
    """Copies of query, key and value with zeros, and gradients of the columns that they had."""

    @staticmethod
    def forward(ctx: Any, copies: LaunchedCopies, query: Tensor, key: Tensor, value: Tensor) -> Triple:
        """Return the copies."""
        ctx.dims = query.shape[3], key.shape[3], value.shape[3]
        ctx.set_materialize_grads(False)
        return copies(query, key, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients' first columns."""
        return None, *(
            gradient if gradient is None else gradient[..., :dim]
            for gradient, dim in zip(gradients, ctx.dims, strict=True)
        )

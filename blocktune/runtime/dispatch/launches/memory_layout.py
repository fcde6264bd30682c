"""How a tensor lies in memory, as far as a launch relies on it, and copies that lie so."""

from typing import Any, TypeGuard

import torch
from torch import Tensor

from blocktune.kernels.base.feature_arguments import broadcast_strides
from blocktune.runtime.dispatch.launches.kinds import ALIGNMENT_BYTES

MemoryLayout = tuple[tuple[int, ...], bool]
"""The strides, 0 where one element serves all, and whether the address is aligned."""


def memory_layout(tensor: Tensor) -> MemoryLayout:
    """Return the layout of a tensor."""
    return broadcast_strides(tensor, tensor.dim()), tensor.data_ptr() % ALIGNMENT_BYTES == 0


def fits_layout(tensor: Tensor, layout: MemoryLayout) -> bool:
    """Return whether a launch for this layout reads the tensor right: an address may be better aligned."""
    strides, aligned = memory_layout(tensor)
    return strides == layout[0] and aligned >= layout[1]


def copy_to_layout(tensor: Tensor, layout: MemoryLayout) -> Tensor:
    """Return a copy with this layout. Where one element serves all in the layout, all elements are the same."""
    strides, _ = layout
    own = tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in strides)]
    memory = tensor.new_empty(1 + sum((size - 1) * step for size, step in zip(own.shape, strides, strict=True)))
    return memory.as_strided(own.shape, strides).copy_(own).expand(tensor.shape)


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous, at an aligned address."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def is_given(tensor: Any) -> TypeGuard[Tensor]:
    """Return whether there is a tensor."""
    return tensor is not None

"""How a tensor lies in memory, as far as a launch relies on it, and copies that lie so."""

from typing import Any, TypeGuard

import torch
from torch import Tensor

from blocktune.kernels.dispatch.kinds import ALIGNMENT_BYTES

MemoryLayout = tuple[tuple[int, ...], bool]
"""The strides, and whether the address is aligned."""


def memory_layout(tensor: Tensor) -> MemoryLayout:
    """Return the layout of a tensor."""
    return tensor.stride(), tensor.data_ptr() % ALIGNMENT_BYTES == 0


def fits_layout(tensor: Tensor, layout: MemoryLayout) -> bool:
    """Return whether a launch for this layout reads the tensor right: an address may be better aligned, and the stride
    of a dimension of size 1 is any."""
    strides, aligned = memory_layout(tensor)
    sizes = zip(tensor.shape, strides, layout[0], strict=True)
    return aligned >= layout[1] and all(size == 1 or own == wanted for size, own, wanted in sizes)


def laid_out_anew(tensor: Tensor, layout: MemoryLayout) -> Tensor:
    """Return a copy with this layout, in which elements that share memory are the same."""
    strides, _ = layout
    places = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for size, stride in zip(tensor.shape, strides, strict=True):
        places = places[..., None] + torch.arange(size, device=tensor.device) * stride
    memory = tensor.new_empty(1 + sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True)))
    memory[places] = tensor
    return memory.as_strided(tensor.shape, strides)


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous, at an aligned address."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def is_given(tensor: Any) -> TypeGuard[Tensor]:
    """Return whether there is a tensor."""
    return tensor is not None

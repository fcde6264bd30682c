"""Memory for results and workspaces, made the way that the code of compiled graphs takes: past PyTorch's parser of
arguments and its dispatcher, which cost as much as the allocation itself."""

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("blocktune")

New = Callable[[], Tensor]
"""Makes memory."""


def new_like(tensor: Tensor, fill: float | None = None) -> New:
    """Return what makes memory with the sizes, strides, data type and device of a tensor, filled with a number or
    not."""
    new = _uninitialized_maker(tensor)
    if fill is None:
        return new
    return (lambda: new().fill_(fill)) if fill else (lambda: new().zero_())


def _uninitialized_maker(tensor: Tensor) -> New:
    sizes, strides, dtype, device = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
    ordinary: New = partial(torch.empty_strided, sizes, strides, dtype=dtype, device=device)
    make = _makes(device.type)
    if make is None:
        return ordinary
    short: New = partial(make, sizes, strides, dtype)
    if device.type == "cpu" or torch.cuda.device_count() < 2:
        return short
    current, index = torch._C._cuda_getDevice, device.index
    return lambda: short() if current() == index else ordinary()  # it takes the current device


@cache
def _makes(device: str) -> Callable[..., Any] | None:
    """Return make(sizes, strides, dtype), which makes a tensor on the current device of a type; None where this PyTorch
    has none that does what it should: it is private to compiled graphs."""
    make: Callable[..., Any] | None = getattr(torch._C._dynamo.guards, f"_empty_strided_{device}", None)
    try:
        made = None if make is None else make((2, 3), (1, 2), torch.float16)
    except Exception as error:  # whatever another version of PyTorch says to such a call
        logger.info("PyTorch's shortest way to memory is not available (%s).", error)
        return None
    if made is None or (made.shape, made.stride(), made.dtype) != ((2, 3), (1, 2), torch.float16):
        return None
    return make if type(made) is Tensor and made.device.type == device else None

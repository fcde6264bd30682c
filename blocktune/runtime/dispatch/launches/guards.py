"""PyTorch's guards around compiled graphs as a check of a call: one call in C compares all that a plan depends on.

They ask tensors for type, sizes, strides, data type, device, `requires_grad` and dispatch keys, which autocast and
inference mode change. They do not cover autocast and tracing (`is_watched`), the grad mode, and addresses.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._functorch import peek_interpreter_stack as functorch_transform
from torch.autograd import forward_ad

logger = logging.getLogger("blocktune")

Guard = Callable[..., bool]
"""Whether tensors are of the kinds that it was made for, each in its place."""


def never(*tensors: Any) -> bool:
    """Return the guard that nothing passes."""
    del tensors
    return False


def is_watched() -> bool:
    """Return whether something decides about a call besides its arguments. `call_obstacle` and `autocast_tensors` look
    at the same states and give reasons."""
    watched: bool = (
        is_any_autocast_enabled()
        or dispatch_modes() > 0
        or functorch_transform() is not None
        or is_tracing()
        or forward_ad._current_level >= 0
    )
    return watched


def make_guard(*tensors: Tensor) -> Guard:
    """Return a check whether tensors have the type, sizes, strides, data type, device and `requires_grad` of these.

    Each tensor is compared with the one in its own place. Addresses are not compared. One tensor in two places never
    passes. A tensor that refuses to give its sizes or strides ends the process, so callers must not pass one.
    """
    make = _guards()
    return never if make is None else make(*tensors)


@cache
def _guards() -> Callable[..., Guard] | None:
    """Return what makes guards; None where this PyTorch has none that say what they should: they are private to it.
    Without them, calls are found by keys, with the same answers."""

    def make(*tensors: Tensor) -> Guard:
        kinds = torch._C._dynamo.guards.TensorGuards
        check: Guard = kinds(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check

    try:
        one, other, third = (torch.empty(1, 2, 3, 4, device="cpu") for _ in range(3))
        guard = make(one, other, third)
        wrong = other.half(), other.mT, other[..., :3], other.clone().requires_grad_(), other.to("meta")
        if guard(one, other, third) and not any(guard(one, tensor, third) for tensor in wrong):
            return make
        logger.info("PyTorch's guards answer otherwise than expected; plans are looked up by key.")
    except Exception as error:  # whatever another version of PyTorch says to such a call
        logger.info("PyTorch's guards are not available (%s); plans are looked up by key.", error)
    return None

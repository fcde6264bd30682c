"""A recorder of the shapes of PyTorch's attention in a program that does not use our kernels: BLOCKTUNE_RECORD."""

import logging
from typing import Any

from torch import Tensor

from blocktune.kernels.files.shape_record import MAX_SHAPES, record
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.runtime.dispatch.launches.layout import Layout
from blocktune.runtime.provider.op_call import OpCall
from blocktune.runtime.provider.server import NO_BOUNDS, Bounds, call_of, op_obstacle

logger = logging.getLogger("blocktune")


class Observer:
    """Stands where a `Server` would, records the shape of each kind of calls once, and leaves all to PyTorch."""

    def __init__(self) -> None:
        self._known: set[Any] = set()

    def forward(
        self,
        asked: OpCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        bounds: Bounds = NO_BOUNDS,
    ) -> None:
        """Record a forward."""
        self._see(Direction.FORWARD, asked, query, key, value, mask, bounds)

    def backward(
        self,
        asked: OpCall,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        mask: Tensor | None = None,
        bounds: Bounds = NO_BOUNDS,
    ) -> None:
        """Record a backward."""
        del grad, out, lse
        self._see(Direction.BACKWARD, asked, query, key, value, mask, bounds)

    def packed(
        self,
        asked: OpCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        begins_q: Tensor,
        begins_k: Tensor | None,
        used: Tensor | None,
        table: Tensor | None,
    ) -> None:
        """Record packed sequences; those over a part of the keys or over pages are not."""
        if used is None and table is None and begins_k is not None:
            self._see(Direction.FORWARD, asked, query, key, value, None, (begins_q, begins_k))

    def _see(
        self,
        direction: Direction,
        asked: OpCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bounds: Bounds,
    ) -> None:
        tensors = (query, key, value, *(tensor for tensor in (mask, *bounds) if tensor is not None))
        kind = (direction, asked, *((tensor.shape, tensor.dtype) for tensor in tensors))
        if kind in self._known or len(self._known) >= MAX_SHAPES:
            return
        self._known.add(kind)
        try:
            record(_shape(direction, asked, query, key, value, mask, bounds))
        except Exception as error:  # the program has not asked for anything that may fail
            logger.warning("A shape is not recorded: %s: %s", type(error).__name__, error)


def _shape(
    direction: Direction,
    asked: OpCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bounds: Bounds,
) -> AttentionShape | None:
    """Return the shape of a call; None of what is none of our shapes."""
    if op_obstacle(asked, query, key, value, mask, bounds) is not None:
        return None
    query, key, value = Layout(asked.layout).to_heads_first(query, key, value)
    call = call_of(asked, query, key, mask, bounds)
    return None if call.obstacle(query, key, value) else call.shape(query, key, value, direction)

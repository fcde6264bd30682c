"""Records the shapes of PyTorch's attention in a program that does not use our kernels: BLOCKTUNE_RECORD."""

import logging
from typing import Any

from torch import Tensor

from blocktune.kernels.files.shape_record import MAX_SHAPES, record
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.runtime.dispatch.launches.layout import Layout
from blocktune.runtime.provider.op_call import OpCall, OpTensors
from blocktune.runtime.provider.server import OpServer, call_of, op_obstacle

logger = logging.getLogger("blocktune")


class Observer(OpServer):
    """Records the shape of each kind of calls once, and leaves all to PyTorch. Packed sequences over a part of the keys
    or over pages are not recorded."""

    def __init__(self) -> None:
        self._known: set[Any] = set()

    def _serve_used(self, asked: OpCall, tensors: OpTensors, used: Tensor, table: Tensor | None) -> None:
        return None

    def _find(self, direction: Direction, asked: OpCall, tensors: OpTensors) -> None:
        given = (*tensors[:3], *tensors.extras)
        kind = (direction, asked, *((tensor.shape, tensor.dtype) for tensor in given))
        if kind in self._known or len(self._known) >= MAX_SHAPES:
            return
        self._known.add(kind)
        try:
            record(_shape(direction, asked, tensors))
        except Exception as error:  # the program has not asked for anything that may fail
            logger.warning("A shape is not recorded: %s: %s", type(error).__name__, error)


def _shape(direction: Direction, asked: OpCall, tensors: OpTensors) -> AttentionShape | None:
    """Return the shape of a call; None of what is none of our shapes."""
    if op_obstacle(asked, tensors) is not None:
        return None
    query, key, value = Layout(asked.layout).to_heads_first(tensors.query, tensors.key, tensors.value)
    call = call_of(asked, query, key, tensors)
    return None if call.obstacle(query, key, value) else call.shape(query, key, value, direction)

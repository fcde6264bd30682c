"""Computes calls of PyTorch's ops with a dispatcher's configs: found again by the fast path, launched by replays.

Ops are below autograd and autocast: nothing is recorded here, and nothing converted.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_deterministic_algorithms as is_deterministic

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import Direction
from blocktune.runtime.api.flash_attn import attend_packed, count_sequences
from blocktune.runtime.api.torch_varlen import used_keys
from blocktune.runtime.dispatch.autograd import NO_VALUES, KernelCall
from blocktune.runtime.dispatch.call import Call, PlanUse
from blocktune.runtime.dispatch.call_checks import check_mask
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.engine import NotServedError, Results
from blocktune.runtime.dispatch.fast_path import BoundCall
from blocktune.runtime.dispatch.launches.layout import Layout
from blocktune.runtime.dispatch.launches.plans import TorchCall, TorchPlan
from blocktune.runtime.dispatch.obstacles import EIGHT_BITS, is_capturing
from blocktune.runtime.dispatch.sdpa_arguments import SdpaArguments, mask_of_scores, scale_of
from blocktune.runtime.dispatch.torch_math import is_sdpa_call
from blocktune.runtime.provider.op_call import PACKED, OpCall, OpTensors

Bounds = tuple[Tensor | None, Tensor | None]
"""Where packed sequences of queries and of keys begin, int32 [sequences + 1]."""

NO_BOUNDS: Bounds = (None, None)


class OpServer(ABC):
    """The calls that the replaced ops make. Every method returns None for what PyTorch computes."""

    @abstractmethod
    def _find(self, direction: Direction, asked: OpCall, tensors: OpTensors) -> KernelCall | None:
        """Return what serves a call."""

    @abstractmethod
    def _serve_used(self, asked: OpCall, tensors: OpTensors, used: Tensor, table: Tensor | None) -> Results | None:
        """Return the output and log-sum-exp of packed queries over the keys that are used, perhaps in pages."""

    def forward(
        self,
        asked: OpCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        bounds: Bounds = NO_BOUNDS,
    ) -> Results | None:
        """Return the output and, if it is wanted, the log-sum-exp."""
        tensors = OpTensors(query, key, value, mask, *bounds)
        bound = self._find(Direction.FORWARD, asked, tensors)
        return None if bound is None else bound.run(query, key, value, tensors.extras, NO_VALUES)

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
    ) -> tuple[Tensor, ...] | None:
        """Return the gradients of query, key and value."""
        tensors = OpTensors(query, key, value, mask, *bounds)
        bound = self._find(Direction.BACKWARD, asked, tensors)
        if bound is None:
            return None
        return bound.gradients((query, key, value, out, lse, *tensors.extras), grad, None)

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
    ) -> Results | None:
        """Return the output and log-sum-exp of packed sequences.

        Args:
            used: how many keys of each sequence take part. table: the pages of each sequence.
        """
        if used is not None:
            return self._serve_used(asked, OpTensors(query, key, value, None, begins_q, begins_k), used, table)
        if table is not None or begins_k is None:
            return None
        return self.forward(asked, query, key, value, bounds=(begins_q, begins_k))


class Server(OpServer):
    """Serves ops with a dispatcher's configs."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def _serve_used(self, asked: OpCall, tensors: OpTensors, used: Tensor, table: Tensor | None) -> Results | None:
        query, key, value, _, begins_q, begins_k = tensors
        if query.dim() != 3 or not _has_scale(query, asked):
            return None
        assert asked.longest is not None  # of packed sequences
        assert begins_q is not None
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            key, value, begins_k = used_keys(key, value, begins_q, begins_k, used, table)
            options: dict[str, Any] = {
                "causal": asked.causal,
                "scale": scale_of(query, asked.scale),
                "window": asked.window,
                "num_splits": asked.num_splits,
                "only_ours": True,
            }
            try:
                return attend_packed(
                    query, key, value, (begins_q, begins_k), asked.longest, options,
                    lse=True, table=table, dispatcher=self._dispatcher,
                )  # fmt: skip
            except NotServedError:
                return None

    def _find(self, direction: Direction, asked: OpCall, tensors: OpTensors) -> KernelCall | None:
        fast_path = self._dispatcher.resolver.fast_path
        way = (direction.value, is_deterministic(), *asked)
        bound = fast_path.known(way, tensors)
        if bound is None:
            bound = self._bind(direction, asked, tensors)
            if not is_capturing(tensors.query):
                fast_path.keep(way, tensors, bound)
        return bound if isinstance(bound, KernelCall) else None

    def _bind(self, direction: Direction, asked: OpCall, tensors: OpTensors) -> BoundCall:
        """Return what serves calls of this kind from now on; a `TorchCall` for those that are PyTorch's."""
        dispatcher, given = self._dispatcher, SdpaArguments(tensors.query, tensors.key, tensors.value)
        obstacle = op_obstacle(asked, tensors)
        if obstacle is not None:
            return TorchCall(dispatcher.torch_plan(obstacle), given)
        layout = Layout(asked.layout)
        query, key, value = layout.to_heads_first(tensors.query, tensors.key, tensors.value)
        call = call_of(asked, query, key, tensors)
        dispatcher.check(query, key, value, call)
        use = PlanUse(sums=asked.sums, competes=is_sdpa_call(query, key, call))
        plan = dispatcher.plan(query, key, value, call, direction, use)
        if isinstance(plan, TorchPlan):
            plan.calls += 1
            return TorchCall(plan, given)
        backward = plan if direction is Direction.BACKWARD else None  # then its forward is launched by no one
        return KernelCall(call, plan, backward, lse=asked.sums, layout=layout)


def call_of(asked: OpCall, query: Tensor, key: Tensor, tensors: OpTensors) -> Call:
    """Return the call of a query and key [batch, heads, length, dim], with the mask and bounds of the op."""
    lengths, mask = None, tensors.mask
    if asked.longest is not None and tensors.begins_q is not None:
        lengths = tensors.begins_q.shape[0] - 1, *asked.longest
    return Call.of(
        causal=asked.causal,
        scale=scale_of(query, asked.scale),
        window=asked.window,
        deterministic=is_deterministic(),
        lengths=lengths,
        num_splits=asked.num_splits,
        mask=None if mask is None else mask_of_scores(mask, key.shape[2]),
        cu_seqlens_q=tensors.begins_q,
        cu_seqlens_k=tensors.begins_k,
    ).over(query, key)


def op_obstacle(asked: OpCall, tensors: OpTensors) -> str | None:
    """Return why PyTorch judges or computes a call, whatever its plan; or None."""
    query, key, value, mask, begins_q, begins_k = tensors
    wanted = 3 if asked.layout == PACKED else 4
    if any(tensor.dim() != wanted for tensor in (query, key, value)):
        return f"query, key and value of the op must have {wanted} dimensions"
    if not _has_scale(query, asked):
        return "the scale is not positive"
    if query.dtype is EIGHT_BITS:
        return "8-bit tensors are for `attention_fp8`"
    if (begins_q is None) is not (begins_k is None):
        return "packed queries and keys must both say where their sequences begin"
    try:
        if mask is not None:
            check_mask(mask, query, key)
        if begins_q is not None and begins_k is not None:
            count_sequences(query, begins_q, begins_k)
    except UsageError as error:
        return str(error)
    return None


def _has_scale(query: Tensor, asked: OpCall) -> bool:
    return scale_of(query, asked.scale) > 0

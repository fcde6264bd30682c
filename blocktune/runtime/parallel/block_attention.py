"""Attention over one block of queries and keys, and its gradients with a log-sum-exp over all keys.

Our kernels compute it where they have a plan for the call. A backward kernel recomputes probabilities as exp(score -
lse), so that it finds the share of the block where lse is over all keys; of float32 it would find statistics of the
block itself, and PyTorch computes it instead.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.values.shape import Direction
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.launches.plans import KernelPlan
from blocktune.runtime.dispatch.obstacles import trace_obstacle
from blocktune.runtime.parallel.block_math import backward_of, forward_of
from blocktune.runtime.parallel.plan.blocks import AttentionBlock


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Options that all blocks of a call share."""

    scale: float
    softcap: float
    deterministic: bool


@dataclass(frozen=True, slots=True)
class FinishedRows:
    """Rows of results over all keys, and their gradients."""

    out: Tensor
    lse: Tensor
    grad: Tensor
    grad_lse: Tensor | None

    @property
    def delta(self) -> Tensor:
        """Return rowsum(out * grad) - grad_lse, in the type of the log-sum-exp."""
        products = (self.out.to(self.lse.dtype) * self.grad.to(self.lse.dtype)).sum(-1)
        return products if self.grad_lse is None else products - self.grad_lse

    def part(self, first: int, last: int) -> "FinishedRows":
        """Return some of the rows."""
        out, grad = (tensor[:, :, first:last] for tensor in (self.out, self.grad))
        grad_lse = None if self.grad_lse is None else self.grad_lse[:, :, first:last].contiguous()
        return FinishedRows(out, self.lse[:, :, first:last].contiguous(), grad, grad_lse)


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, block: AttentionBlock, numbers: ScoreOptions, dispatcher: Dispatcher
) -> tuple[Tensor, Tensor]:
    """Return the output [batch, num_heads, seqlen_q, head_dim_v] and the log-sum-exp over the keys of a block."""
    if numbers.scale > 0 and trace_obstacle(query, key, value) is None:
        call = call_of(block, numbers, query.device)
        plan = dispatcher.plan(query, key, value, call, Direction.FORWARD)
        if isinstance(plan, KernelPlan):
            out, lse = plan.forward(query, key, value, numbers.scale, call.extras)
            assert lse is not None  # the plan is one with log-sum-exp
            return out, lse.view(query.shape[:3])
    return forward_of(query, key, value, block, numbers.scale, numbers.softcap)


def gradients_of_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: FinishedRows,
    block: AttentionBlock,
    numbers: ScoreOptions,
    dispatcher: Dispatcher,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a block adds to the gradients of its query, key and value."""
    takes = numbers.scale > 0 and query.dtype is not torch.float32
    if takes and trace_obstacle(query, key, value) is None:
        call = call_of(block, numbers, query.device)
        plan = dispatcher.plan(query, key, value, call, Direction.BACKWARD)
        if isinstance(plan, KernelPlan):
            lse, grad_lse = rows.lse, rows.grad_lse
            if block.bounds_q:  # of packed sequences [num_heads, tokens]
                lse, grad_lse = lse[0], None if grad_lse is None else grad_lse[0]
            extras = call.extras.with_grad_lse(grad_lse)
            return plan.backward(query, key, value, rows.out, lse, rows.grad, numbers.scale, extras)
    return backward_of(query, key, value, rows.lse, rows.delta, rows.grad, block, numbers.scale, numbers.softcap)


def call_of(block: AttentionBlock, numbers: ScoreOptions, device: torch.device) -> Call:
    """Return the call that computes a block."""
    given: dict[str, Any] = {"window": block.window, "softcap": numbers.softcap}
    if block.bounds_q:
        longest_q, longest_k = (max(sizes) for sizes in zip(*block.sizes, strict=True))
        given["lengths"] = len(block.bounds_q) - 1, longest_q, longest_k
        given |= {"cu_seqlens_q": _on(device, block.bounds_q), "cu_seqlens_k": _on(device, block.bounds_k)}
    return Call.of(causal=block.causal, scale=numbers.scale, deterministic=numbers.deterministic, **given)


@lru_cache(maxsize=256)
def _on(device: torch.device, bounds: tuple[int, ...]) -> Tensor:
    """Return the bounds of packed sequences on a device."""
    return torch.tensor(bounds, dtype=torch.int32, device=device)

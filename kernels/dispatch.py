"""Attention for production: PyTorch's scaled_dot_product_attention, with tuned kernels where they can run.

A call builds a key, finds its plan and launches. A key that is new is resolved once, down the ladder of `ladder.py`,
and remembered. Nothing that is wrong with a store, a config or a kernel reaches the caller: the next rung computes the
same.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from blocktune.kernels.device import DeviceSpec, device_named
from blocktune.kernels.errors import UsageError
from blocktune.kernels.explanation import Explanation
from blocktune.kernels.ladder import Rung
from blocktune.kernels.plan import (
    KERNEL_DEVICE,
    Plan,
    call_obstacle,
    is_plain_call,
    needs_gradients,
    plan_key,
    scaled_dot_product_attention,
    torch_attention,
)
from blocktune.kernels.resolver import Resolver
from blocktune.kernels.shape import AttentionShape, Causal
from blocktune.kernels.source import ConfigSource, default_source
from blocktune.kernels.training import TrainingPlan


class Dispatcher:
    """Attention with the configs of a source; call it as torch.nn.functional.scaled_dot_product_attention.

    The source is read once per process and device, at the first call that needs it. Threads may share a dispatcher,
    and it survives a fork. What it decides and why is logged by the logger `blocktune` and told by `explain`.

    Args:
        source: where configs come from; by default the user's store above the results that ship with the package.
    """

    def __init__(self, source: ConfigSource | None = None) -> None:
        self._source = default_source() if source is None else source
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self.reload()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Scaled dot product attention, as PyTorch defines it: upper-left causal, zeros where a query sees no key.

        query [batch, heads, L, E], key [batch, heads_kv, S, E], value [batch, heads_kv, S, Ev]; the output [batch,
        heads, L, Ev] has the dimension order of the query. Gradients are computed by our kernels where
        both directions have one. What the kernels do not run (masks, dropout, tensors on the CPU, ...) is computed by
        PyTorch; `explain` with the same arguments says so.

        Raises:
            UsageError: both attn_mask and is_causal are given. PyTorch raises for all other wrong arguments.
        """
        if is_compiling():
            return scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if attn_mask is None and not dropout_p and is_plain_call(query, key, value):
            plan = self._plans.get(plan_key(query, key, value, is_causal, enable_gqa))
            if plan is not None:
                return plan.run(query, key, value, scale)
        return self._call_slowly(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def explain(
        self,
        query: Tensor | AttentionShape,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        device: DeviceSpec | str | None = None,
    ) -> Explanation:
        """Which config serves a shape, or a call with these arguments, and why not a better one.

        For tensors the answer is what the call does. For a shape it is what aligned, contiguous tensors would get on
        `device` (a DeviceSpec or a name; by default the current GPU).

        Raises:
            UnknownDeviceError: no device has this name.
            UsageError: neither a shape nor three tensors are given.
        """
        if isinstance(query, AttentionShape):
            named = device_named(device) if isinstance(device, str) else device
            with self._miss_lock():
                return self._resolver.explain(query, named)
        if key is None or value is None:
            raise UsageError(
                "`explain` takes an AttentionShape, or the query, key and value of a call; key or value is missing."
            )
        obstacle = call_obstacle(query, key, value, attn_mask, dropout_p)
        if obstacle is not None:
            return Explanation(rung=Rung.SDPA, reason=obstacle)
        if needs_gradients(query, key, value):
            training = self._training(query, key, value, is_causal, enable_gqa)
            return training if isinstance(training, Explanation) else training.explanation
        return self._plan(query, key, value, is_causal, enable_gqa).explanation

    def warmup(self, shapes: Iterable[AttentionShape]) -> list[Explanation]:
        """Resolves, compiles and loads what calls with these shapes need, on the current GPU.

        Both usual layouts are run once, [batch, heads, length, head_dim] and [batch, length, heads, head_dim].

        Raises:
            UsageError: a shape is causal from the lower right, which this signature cannot ask for.
        """
        explanations = []
        for shape in shapes:
            if shape.causal is Causal.LOWER_RIGHT and shape.seqlen_q != shape.seqlen_k:
                raise UsageError(
                    f"`attention` is causal from the upper left, but got {shape.label}. Warm up another shape."
                )
            for transposed in (True, False):
                tensors = _example_tensors(shape, transposed=transposed)
                is_causal, enable_gqa = shape.causal is not Causal.NONE, shape.group_size > 1
                self(*tensors, is_causal=is_causal, enable_gqa=enable_gqa)
            explanations.append(self.explain(*tensors, is_causal=is_causal, enable_gqa=enable_gqa))
        return explanations

    def reload(self) -> None:
        """Forgets all plans and reads the sources again at the next call. Calls in other threads are not disturbed."""
        self._resolver = Resolver(self._source)
        self._plans = self._resolver.plans

    def misses(self) -> dict[AttentionShape, int]:
        """How often shapes were called that have no measurement of their own on this device, most frequent first.

        Counts go back to the last reload, or to the last time that `MAX_PLANS` plans were reached.
        """
        counts: Counter[AttentionShape] = Counter()
        for plan in tuple(self._plans.values()):
            if plan.explanation.shape is not None and plan.explanation.rung is not Rung.EXACT:
                counts[plan.explanation.shape] += plan.calls
        return dict(counts.most_common())

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Copies and pickles of `attention` are `attention` itself; other dispatchers start anew from their source."""
        return "attention" if self is attention else (Dispatcher, (self._source,))

    def _call_slowly(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        if attn_mask is not None and is_causal:
            raise UsageError(
                "Only one of `attn_mask` and `is_causal` can be given, but got both. Put the triangle in the mask."
            )
        if call_obstacle(query, key, value, attn_mask, dropout_p) is not None:
            return torch_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if needs_gradients(query, key, value):
            training = self._training(query, key, value, is_causal, enable_gqa)
            if isinstance(training, Explanation) or (scale is not None and not scale > 0):
                return torch_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
            return training.run(query, key, value, scale)
        return self._plan(query, key, value, is_causal, enable_gqa).run(query, key, value, scale)

    def _training(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool
    ) -> TrainingPlan | Explanation:
        place = plan_key(query, key, value, is_causal, enable_gqa)
        plan = self._resolver.training_plans.get(place)
        if plan is None:
            with self._miss_lock():
                resolver = self._resolver
                plan = resolver.training_plans.get(place) or resolver.resolve_training(
                    place, query, key, value, is_causal, enable_gqa
                )
        return plan

    def _plan(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> Plan:
        place = plan_key(query, key, value, is_causal, enable_gqa)
        plan = self._plans.get(place)
        if plan is None:
            with self._miss_lock():
                resolver = self._resolver
                plan = resolver.plans.get(place) or resolver.resolve(place, query, key, value, is_causal, enable_gqa)
        return plan

    def _miss_lock(self) -> threading.RLock:
        """Only misses take it. A forked child may have inherited it locked by a thread that it does not have."""
        if os.getpid() != self._pid:
            self._lock, self._pid = threading.RLock(), os.getpid()
        return self._lock


def _example_tensors(shape: AttentionShape, *, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value of this shape on the current GPU; transposed: laid out [batch, length, heads, head_dim]."""

    def example(heads: int, length: int, dim: int) -> Tensor:
        sizes = (shape.batch, length, heads, dim) if transposed else (shape.batch, heads, length, dim)
        tensor = torch.zeros(sizes, dtype=getattr(torch, shape.dtype), device=KERNEL_DEVICE)
        return tensor.transpose(1, 2) if transposed else tensor

    return (
        example(shape.num_heads, shape.seqlen_q, shape.head_dim),
        example(shape.num_heads_kv, shape.seqlen_k, shape.head_dim),
        example(shape.num_heads_kv, shape.seqlen_k, shape.head_dim_v),
    )


attention = Dispatcher()
"""The dispatcher of this process: the user's store above the shipped results. Nothing is read before the first call."""


def best_config(shape: AttentionShape, device: DeviceSpec | str | None = None) -> Explanation:
    """The config that `attention` takes for a shape, on a device or its name (by default the current GPU), and why.

    Raises:
        UnknownDeviceError: no device has this name.
    """
    return attention.explain(shape, device=device)

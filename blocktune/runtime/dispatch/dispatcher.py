"""Attention for production: PyTorch's scaled_dot_product_attention, with tuned kernels where they can run.

A call builds a key, finds its plan and launches. A key that is new is resolved once, down the ladder of `ladder.py`,
and remembered. Nothing that is wrong with a store, a config or a kernel reaches the caller: the next source
computes the same.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack as functorch_transform
from torch.compiler import is_compiling, is_dynamo_compiling

from blocktune.kernels.hardware.device import DeviceSpec, device_of
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape, Direction, require_shape
from blocktune.runtime.dispatch.engine import Engine
from blocktune.runtime.dispatch.example_call import (
    example_options,
    example_tensors,
    require_callable,
    require_gpu,
)
from blocktune.runtime.dispatch.fast_path import BoundCall, FastPath
from blocktune.runtime.dispatch.graphs.sdpa import traced_attention
from blocktune.runtime.dispatch.launches.dtensors import attend_locally, is_distributed, refuse_distributed
from blocktune.runtime.dispatch.launches.layout import Layout
from blocktune.runtime.dispatch.launches.padding import padding_of
from blocktune.runtime.dispatch.launches.plans import TorchCall, TorchPlan
from blocktune.runtime.dispatch.obstacles import KERNEL_DEVICE, is_capturing, is_symbolic
from blocktune.runtime.dispatch.sdpa_arguments import (
    SdpaArguments,
    make_call,
    plain_call,
    rescale,
    type_obstacle,
)
from blocktune.runtime.dispatch.torch_attention import unconverted_attention
from blocktune.runtime.selection.explanation import Explanation
from blocktune.runtime.selection.ladder import Rung

_SDPA = "scaled_dot_product_attention"
"""The entry point, as the first option of a fast path's key."""


class Dispatcher(Engine):
    """Attention with the configs of a source; call it as torch.nn.functional.scaled_dot_product_attention.

    The source is read once per process and device, from the first call that needs it on. Files are read on threads of
    their own: a call waits a moment for them and goes on with the layers that are there; when more come, its plans are
    made again. `explain`, `warmup` and `reload` wait for all, and so does every call of a strict dispatcher. Threads
    may share a dispatcher, and it survives a fork. The logger `blocktune` logs what it decides and why, and `explain`
    shows it.

    Args:
        source: where configs come from; by default the user's store above the results that ship with the package.
        strict: take only what was measured for exactly the shape, device, kernel source, triton, ptxas and driver;
            all else is computed by PyTorch, without an error, and `explain` says so. The first call waits until the
            source is read.

    Raises:
        UsageError: `source` is no source, such as a path.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return scaled dot product attention, as PyTorch defines it: upper-left causal, zeros where a query sees no
        key.

        query [batch, heads, L, E], key [batch, heads_kv, S, E], value [batch, heads_kv, S, Ev]; the output [batch,
        heads, L, Ev] has the dimension order of the query. attn_mask is boolean (True where the query sees the key) or
        added to the scores, and broadcasts to [batch, heads, L, S]. PyTorch computes tensors of other ranks and nested
        ones. Gradients are computed by our kernels where both directions have one. What they do not run (a mask that
        requires a gradient, tensors on the CPU, ...) is computed by PyTorch; `explain` with the same arguments says so.

        Raises:
            UsageError: our kernels take the tensors, but dropout_p is outside [0, 1], or attn_mask has another shape or
                data type. It is a RuntimeError, as PyTorch's is.
            TooFewDimensionsError: they do, but attn_mask has fewer than two dimensions. It is an IndexError as well.
            Exception: PyTorch's own, for all other wrong arguments: a TypeError for one of another type, a RuntimeError
                for tensors that do not fit each other. attn_mask together with is_causal is computed or refused as the
                installed PyTorch does.
        """
        if is_dynamo_compiling():  # other tracers are found by their modes, in `_call_slowly`
            return traced_attention(self._number, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if type(is_causal) is bool and type(enable_gqa) is bool:  # 1 equals True, but PyTorch refuses it
            tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
            options = (_SDPA, len(tensors), dropout_p, is_causal, scale, enable_gqa)
            bound = self._resolver.fast_path.find(options, tensors)
            if bound is not None:
                return bound(*tensors)[0]
        given = SdpaArguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        tensors = given[:3] if attn_mask is None else given[:4]
        way = (_SDPA, len(tensors), *given[4:])
        return self._call_slowly(given, lambda fast_path, bound: fast_path.add(way, tensors, bound))

    def plain(self, given: SdpaArguments) -> Tensor:
        """Return a call without gradients, mask and dropout, for the op of compiled graphs: the output has the strides
        of `empty_output` whoever computes it."""
        query, key, value, *options = given
        bound = self.find_call(("attention_plain", *options), query, key, value)
        if bound is not None:
            return bound(query, key, value)[0]

        def remember(fast_path: FastPath, bound: BoundCall) -> None:
            fast_path.add(("attention_plain", *options), (query, key, value), bound)

        return self.forward(query, key, value, plain_call(given), lse=False, sums=False, remember=remember)[0]

    def rows(
        self, way: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, enable_gqa: bool
    ) -> Tensor:
        """Return attention of tensors [batch, length, heads, head_dim], and add the call to the fast path.

        Args:
            way: the options by which the entry point finds the call again, with q, k and v and no other tensor.
        """
        query, key, value = Layout.LENGTH_FIRST.to_heads_first(q, k, v)

        def remember(fast_path: FastPath, bound: BoundCall) -> None:
            fast_path.add(way, (q, k, v, None, None), bound.with_layout(Layout.LENGTH_FIRST))

        given = SdpaArguments(query, key, value, None, 0.0, is_causal, scale, enable_gqa)
        return Layout.LENGTH_FIRST.from_heads_first(self._call_slowly(given, remember, Layout.LENGTH_FIRST))

    def explain(
        self,
        query: Tensor | AttentionShape,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        device: DeviceSpec | str | None = None,
    ) -> Explanation:
        """Return which config serves a shape, or a call with these arguments, and why not a better one.

        For tensors the answer is what the call does. For a shape it is what aligned, contiguous tensors would get on
        `device` (a DeviceSpec or a name; by default the current GPU). Waits until the source is read.

        Raises:
            UnknownDeviceError: no device has this name.
            UsageError: neither a shape nor three tensors are given.
        """
        if isinstance(query, AttentionShape):
            named = None if device is None else device_of(device)
            self._settle(named)
            with self._miss_lock():
                return self._resolver.explain(query, named)
        if key is None or value is None:
            raise UsageError(
                "`explain` takes an AttentionShape, or the query, key and value of a call, but key or value is "
                "missing. Pass all three."
            )
        given = SdpaArguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        obstacle = type_obstacle(given)
        if obstacle is not None:
            return Explanation(rung=Rung.SDPA, reason=obstacle)
        if query.device.type == KERNEL_DEVICE:
            self._settle(query.device.index)
        given, call = make_call(given)
        if isinstance(call, str):
            return Explanation(rung=Rung.SDPA, reason=call)
        query, key, value, *_ = given
        padding = padding_of(query, value, call)
        if padding is not None:
            query, key, value = padding.copies(query, key, value)
        plans = self.plans(query, key, value, call)
        return plans.explanation if isinstance(plans, TorchPlan) else plans[0].explanation

    def warmup(self, shapes: Iterable[AttentionShape]) -> list[Explanation]:
        """Resolve, compile and load what calls with these shapes need, on the current GPU, once the source is read.

        Both usual layouts are run once, [batch, heads, length, head_dim] and [batch, length, heads, head_dim]; those of
        a backward with gradients, those with a mask with one [seqlen_q, seqlen_k].

        Raises:
            NoDeviceError: there is no GPU here.
            UsageError: a shape is of 8-bit tensors or causal from the lower right, or has features that this signature
                cannot ask for.
        """
        wanted = list(shapes)
        for shape in wanted:
            require_callable(shape)
        require_gpu()
        explanations = []
        self._settle(None)
        for shape in wanted:
            for transposed in (True, False):
                tensors, options = example_tensors(shape, transposed=transposed), example_options(shape)
                with torch.enable_grad():
                    out = self(*tensors, **options)
                if shape.direction is Direction.BACKWARD:
                    torch.autograd.grad(out, tensors, torch.zeros_like(out))
            with torch.enable_grad():
                explanations.append(self.explain(*tensors, **options))
        return explanations

    def misses(self) -> dict[AttentionShape, int]:
        """Return how often shapes were called that have no measurement of their own on this device, most frequent
        first.

        Counts go back to the last reload, to the last time that `MAX_PLANS` plans were reached, or to when the source
        had been read.
        """
        counts: Counter[AttentionShape] = Counter()
        for plan in list(self._resolver.plans.values()):
            if plan.calls and plan.explanation.shape is not None and not plan.explanation.is_measured_here:
                counts[plan.explanation.shape] += plan.calls
        return dict(counts.most_common())

    def __repr__(self) -> str:
        """Return what it is, and which sources have served its calls; nothing is read for it."""
        calls: Counter[str] = Counter()
        for plan in list(self._resolver.plans.values()):
            calls[str(plan.explanation.rung)] += plan.calls
        served = ", ".join(f"{rung} {count:,}" for rung, count in calls.most_common() if count)
        name = "blocktune.attention" if self is attention else "Dispatcher"
        return f"<{name}{', strict' if self._strict else ''}: {served or 'no call yet'}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Return what a pickle holds: `attention` is itself again, other dispatchers are built from their source."""
        if self is attention:
            return "attention"
        return partial(Dispatcher, strict=self._strict), (self._source,)

    def _call_locally(self, given: SdpaArguments) -> Tensor:
        """Return a call of DTensors.

        Raises:
            UsageError: pairs are to be dropped.
        """
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = given
        if dropout_p:
            refuse_distributed(query, "Attention with dropout")

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
            return self(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa), None

        return attend_locally(attend, query, key, value, {"mask": attn_mask})[0]

    def _call_slowly(
        self, given: SdpaArguments, remember: Callable[[FastPath, BoundCall], None], layout: Layout = Layout.HEADS_FIRST
    ) -> Tensor:
        """Return attention of a call that the fast path does not know.

        Args:
            remember: adds what serves the call to the fast path.
            layout: of the entry point's tensors, which autograd keeps: checkpoints compare them in all calls.
        """
        if is_compiling():
            return traced_attention(self._number, *given)
        if type_obstacle(given) is not None:
            return unconverted_attention(given)
        if functorch_transform() is not None:  # functorch needs PyTorch's own op
            return unconverted_attention(rescale(given))
        if is_distributed(given.query) and given.query.dim() == 4:
            return self._call_locally(given)
        if is_symbolic(given.query) and 0.0 <= given.dropout_p <= 1.0:  # PyTorch computes others without a look at it
            return traced_attention(self._number, *given)
        arguments, call = make_call(given)
        if is_capturing(given.query) or not (given.scale is None or given.scale > 0):
            remember = _forget
        resolver, serve = self._resolver, partial(self.serve, layout=layout, remember=remember)
        found = self.torch_plan(call) if isinstance(call, str) else serve(*arguments[:3], call)
        if not isinstance(found, TorchPlan):
            return found[0]
        by_torch = TorchCall(found, arguments)
        remember(resolver.fast_path, by_torch)
        return by_torch(*(arguments[:3] if arguments.attn_mask is None else arguments[:4]))[0]


def _forget(fast_path: FastPath, bound: BoundCall) -> None:
    """Add nothing to the fast path: the call does not repeat."""
    del fast_path, bound


attention = Dispatcher()
"""The dispatcher of this process: the user's store above the shipped results. Nothing is read before the first call."""


def best_config(shape: AttentionShape, device: DeviceSpec | str | None = None) -> Explanation:
    """Return the config that `attention` takes for a shape, on a device or its name (by default the current GPU), and
    why.

    Raises:
        UnknownDeviceError: no device has this name.
        WrongTypeError: it is no shape, or no device.
    """
    require_shape(shape)
    return attention.explain(shape, device=device)

"""Attention of 8-bit tensors with scales."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from blocktune.kernels.values.errors import UsageError, require_type
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.call_checks import check_dimensions, check_sizes
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention
from blocktune.runtime.dispatch.graphs.engines import Remember
from blocktune.runtime.dispatch.launches.dtensors import attend_locally, is_distributed
from blocktune.runtime.dispatch.launches.plans import TorchPlan
from blocktune.runtime.dispatch.obstacles import EIGHT_BITS, needs_gradients, trace_obstacle
from blocktune.runtime.dispatch.sdpa_arguments import scale_of


def attention_fp8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dispatcher: Dispatcher = attention,
) -> Tensor:
    """Compute attention of torch.float8_e4m3fn tensors: query [batch, num_heads, L, E], key [batch, num_heads_kv, S,
    E], value [batch, num_heads_kv, S, Ev]; the output is bfloat16 [batch, num_heads, L, Ev] in the dimension order of
    the query.

    The tensors stand for their numbers times a positive scale: float32, one for all (shape ()), for every head
    ([num_heads], of key and value [num_heads_kv]) or for every head of a batch entry ([batch, num_heads(_kv)]); 1
    unless given. is_causal is from the upper left, scale 1 / sqrt(E) unless given, both as in PyTorch's attention.

    On Hopper a kernel multiplies 8-bit numbers and rounds probabilities to e4m3 as well: about 2.5 % relative error
    (Frobenius), where bfloat16 has 0.3 %. Everywhere else, in a compiled graph and for sizes that the kernel does not
    take, the same is computed in bfloat16. There are no gradients. dispatcher: whose configs serve the call.

    Raises:
        UsageError: the tensors are not of 8 bits, do not fit each other or require a gradient, or a scale has another
            type, shape or device.
    """
    way, tensors = ("attention_fp8", is_causal, scale), (query, key, value, scale_q, scale_k, scale_v)
    bound = None if is_compiling() else dispatcher.find_call(way, *tensors)
    if bound is not None:
        return bound(query, key, value, *(_rows(tensor) for tensor in tensors[3:] if tensor is not None))[0]
    _check(query, key, value, scale_q, scale_k, scale_v)
    batch, heads, heads_kv = query.shape[0], query.shape[1], key.shape[1]
    scales: dict[str, Any] = {
        "scale_q": _by_head("scale_q", scale_q, batch, heads, query),
        "scale_k": _by_head("scale_k", scale_k, batch, heads_kv, query),
        "scale_v": _by_head("scale_v", scale_v, batch, heads_kv, query),
    }
    scale = scale_of(query, scale)
    remember: Remember = lambda fast_path, bound: fast_path.add(way, tensors, bound)  # noqa: E731
    attend = partial(_attend, is_causal=is_causal, scale=scale, dispatcher=dispatcher, remember=remember)
    if is_distributed(query):
        return attend_locally(lambda *own, **of_own: (attend(*own, **of_own), None), query, key, value, scales)[0]
    return attend(query, key, value, **scales)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float,
    dispatcher: Dispatcher,
    remember: Remember,
) -> Tensor:
    """Return the output of a call that was checked, whose scales have two dimensions."""
    if scale > 0 and trace_obstacle(query, key, value) is None:
        causal = Causal.UPPER_LEFT if is_causal else Causal.NONE
        call = Call.of(causal=causal, scale=scale, scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)
        found = dispatcher.serve(query, key, value, call, remember=remember)
        if not isinstance(found, TorchPlan):
            return found[0]
    q, k, v = _widen(query, scale_q), _widen(key, scale_k), _widen(value, scale_v)
    return dispatcher(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=bool(q.shape[1] != k.shape[1]))


def _check(query: Tensor, key: Tensor, value: Tensor, *scales: Tensor | None) -> None:
    """Check the arguments.

    Raises:
        UsageError: as `attention_fp8` says.
    """
    check_dimensions("[batch, heads, length, dim]", query=query, key=key, value=value)
    check_sizes(query, key, value)
    if query.dtype is not EIGHT_BITS:
        raise UsageError(
            f"query, key and value of `attention_fp8` must be {EIGHT_BITS}, but got {query.dtype}. Convert them, or "
            "call `attention`."
        )
    given = [scale for scale in scales if isinstance(scale, Tensor)]
    if needs_gradients(query, key, value, *given):
        raise UsageError(
            "`attention_fp8` has no gradients, but query, key, value or a scale requires one. Detach it, or call "
            "`attention` with bfloat16."
        )


def _by_head(name: str, scale: Tensor | None, batch: int, heads: int, query: Tensor) -> Tensor | None:
    """Return the scale as [batch or 1, heads or 1].

    Raises:
        WrongTypeError: it is no tensor.
        UsageError: it is no float32 tensor of one of the shapes on the query's device.
    """
    if scale is None:
        return None
    require_type(name, scale, Tensor, "Make one: torch.tensor(scale, device=query.device).")
    if scale.dtype is not torch.float32 or tuple(scale.shape) not in ((), (heads,), (batch, heads)):
        raise UsageError(
            f"`{name}` must be float32 [], [heads] or [batch, heads] with ({batch=}, {heads=}), but got {scale.dtype} "
            f"{tuple(scale.shape)}. Give one for all, or one for every head."
        )
    if scale.device != query.device:
        raise UsageError(f"`{name}` must be on the query's device, but got {scale.device} and {query.device}. Move it.")
    return _rows(scale)


def _rows(scale: Tensor) -> Tensor:
    """Return the scale with two dimensions."""
    return scale if scale.dim() == 2 else scale.reshape(1, -1)


def _widen(tensor: Tensor, scale: Tensor | None) -> Tensor:
    """Return the numbers that an 8-bit tensor stands for, in bfloat16, which holds every e4m3 exactly."""
    return tensor.bfloat16() if scale is None else (tensor.float() * scale[..., None, None]).bfloat16()

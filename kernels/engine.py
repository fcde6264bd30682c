"""Calls with features: from a shape with its extras to a plan that has run once, as `Dispatcher` has for plain calls.

Configs come from the ladder of the process's dispatcher, `blocktune.attention`; what no kernel serves is computed by
the PyTorch mathematics that the caller brings.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.config import KernelConfig
from blocktune.kernels.dispatch import attention
from blocktune.kernels.errors import UsageError
from blocktune.kernels.explanation import Explanation
from blocktune.kernels.extras import Extras
from blocktune.kernels.kernel import Launch
from blocktune.kernels.plan import ALIGNMENT_BYTES, KERNEL_DEVICE, empty_output, needs_gradients, on_its_device
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.resolver import MAX_PLANS, is_capturing
from blocktune.kernels.shape import ELEMENT_BYTES, AttentionShape, Causal

logger = logging.getLogger("blocktune")

Mathematics = Callable[[], tuple[Tensor, Tensor]]
"""Computes the call in PyTorch: output and log-sum-exp."""

_plans: dict[Any, Launch | Explanation] = {}


def attend(
    shape: AttentionShape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    extras: Extras,
    scale: float,
    *,
    check: Callable[[], None],
    mathematics: Mathematics,
) -> tuple[Tensor, Tensor]:
    """The output, laid out like the query, and the log-sum-exp [batch, num_heads, seqlen_q] of a call with features.

    check: raises what is wrong with the values of the extras. It may have to wait for the GPU, so it is asked at the
    first call of its kind alone, and never while a CUDA graph is captured.

    Raises:
        UsageError: gradients are needed, or what `check` raises.
    """
    if needs_gradients(query, key, value):
        raise UsageError(
            "This entry point computes no gradients, but a tensor requires one. Call it under torch.no_grad(), or "
            "`blocktune.attention` with an ordinary mask."
        )
    place = _place(shape, query, key, value, extras)
    plan = _plans.get(place)
    if plan is None:
        plan = _resolve(place, shape, (query, key, value), extras, scale, check)
    if isinstance(plan, Explanation):
        return mathematics()
    out = empty_output(query, shape.head_dim_v)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    plan(query, key, value, out, lse, scale, extras)
    return out, lse


def shape_of_call(
    query: Tensor, num_heads_kv: int, seqlen_k: int, head_dim_v: int, causal: Causal, **more: Any
) -> AttentionShape:
    """The shape of a call by its query [batch, num_heads, seqlen_q, head_dim] and what is known of its keys.

    Raises:
        UsageError: a size or the data type is none of attention.
    """
    batch, num_heads, seqlen_q, head_dim = query.shape
    dtype = str(query.dtype).removeprefix("torch.")
    return AttentionShape(
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype if dtype in ELEMENT_BYTES else "float32",  # others are computed by PyTorch, in float32
        causal=causal,
        **more,
    )


def _place(shape: AttentionShape, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> tuple[Any, ...]:
    tensors = (query, key, value, extras.cache_seqlens, extras.block_table, extras.tree_mask)
    mask = extras.block_mask
    return (
        shape,
        query.dtype,
        None if mask is None else (mask.block_q, mask.block_k),
        *((t.stride(), t.device, t.data_ptr() % ALIGNMENT_BYTES) for t in tensors if t is not None),
    )


def _resolve(
    place: Any,
    shape: AttentionShape,
    tensors: tuple[Tensor, Tensor, Tensor],
    extras: Extras,
    scale: float,
    check: Callable[[], None],
) -> Launch | Explanation:
    """The first config down the ladder that launches; remembered unless a CUDA graph is being captured."""
    query = tensors[0]
    capturing = is_capturing(query)
    if not capturing:
        check()
    if query.device.type != KERNEL_DEVICE or str(query.dtype).removeprefix("torch.") != shape.dtype:
        return attention.explain(shape)
    if capturing:
        raise UsageError(
            f"A call must have run once before a CUDA graph captures it, but {shape.label} is new. Call it before."
        )
    with attention._miss_lock():
        found = attention._resolver.climb(
            shape, query.device.index, lambda config: _tried(config, shape, tensors, extras, scale)
        )
    plan = found if isinstance(found, Explanation) else found[1]
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[place] = plan
    return plan


def _tried(
    config: KernelConfig, shape: AttentionShape, tensors: tuple[Tensor, Tensor, Tensor], extras: Extras, scale: float
) -> Launch | str:
    """A launcher that has launched this very call, or why the config cannot."""
    kernel, query = get_kernel(config.kernel), tensors[0]
    problem = kernel.layout_problem(*tensors)
    if problem is not None:
        return problem
    out = empty_output(query, shape.head_dim_v)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    try:
        launch = kernel.bind(config, shape)
        with torch.cuda.device_of(query):
            launch(*tensors, out, lse, scale, extras)
        return on_its_device(launch, query.device.index)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers and drivers raise what they like; a mask's blocks may be smaller than tiles
        logger.warning("%s: %s does not launch: %.500s. The next rung is taken.", shape.label, config.label, error)
        return f"{config.label} does not launch: {type(error).__name__}: {error}"

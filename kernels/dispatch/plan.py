"""What a plan depends on, and what can stand in the way of our kernels.

Whatever a plan relies on is in its key (`Call.place`), or is looked at in every call.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._functorch import peek_interpreter_stack as functorch_transform
from torch.autograd import forward_ad

from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.base.precision import allows_tf32
from blocktune.kernels.dispatch.torch_attention import ALIGNMENT_BYTES
from blocktune.kernels.values.shape import ELEMENT_BYTES, FP8
from blocktune.kernels.values.short_numbers import CACHE_TYPES

KERNEL_DEVICE = "cuda"
AUTOCAST_DEVICES = ("cpu", "cuda")
"""Where autocast may be on; a constant, since Dynamo of PyTorch 2.11 cannot trace the question."""

DTYPE_NAMES = {getattr(torch, name): name for name in ELEMENT_BYTES}
EIGHT_BITS = getattr(torch, FP8)


def empty_output(query: Tensor, head_dim_v: int) -> Tensor:
    """Return a new output with the dimension order of the query, as SDPA's has; bfloat16 of 8-bit tensors."""
    is_short = query.dtype is EIGHT_BITS
    dtype = torch.bfloat16 if is_short else query.dtype
    if head_dim_v == query.shape[-1]:
        return torch.empty_like(query, dtype=dtype) if is_short else torch.empty_like(query)
    shape = (*query.shape[:-1], head_dim_v)
    return query.new_empty_strided(shape, strides_like(query.stride(), shape), dtype=dtype)


def strides_like(strides: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor of this shape whose dimensions follow each other as in `strides`.

    A broadcast dimension (stride 0) has no place in memory and comes last.
    """
    dense, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: strides[dim] or inf):
        dense[dim] = step
        step *= shape[dim]
    return tuple(dense)


def tensors_kind(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
    """Return all of the tensors that a plan depends on.

    Pointers count by their alignment only: Triton compiles other code for aligned ones, and descriptors need it.
    """
    pointers = query.data_ptr(), key.data_ptr(), value.data_ptr()
    aligned = not (pointers[0] | pointers[1] | pointers[2]) % ALIGNMENT_BYTES
    return (
        query.shape,  # first what differs most between calls
        key.shape,
        value.shape,
        query.stride(),
        key.stride(),
        value.stride(),
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        key.get_device(),
        value.get_device(),
        aligned or tuple(pointer % ALIGNMENT_BYTES == 0 for pointer in pointers),
        rounds_products(query),
    )


def rounds_products(query: Tensor) -> bool:
    """Return whether products of such tensors round their factors now: our kernels are compiled for either."""
    return query.dtype is torch.float32 and allows_tf32()


def call_obstacle(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0
) -> str | None:
    """Return why this very call goes to PyTorch, whatever its plan; or None."""
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if query.dtype is EIGHT_BITS:
        return "8-bit tensors are for `attention_fp8`"
    problem = trace_obstacle(*tensors)
    if problem is not None:
        return problem
    if any(tensor.layout is not torch.strided for tensor in (query, key, value)):
        return "a tensor has no strides"
    if attn_mask is not None and attn_mask.layout is not torch.strided:
        return "attn_mask has no strides"
    if attn_mask is not None and attn_mask.requires_grad and is_grad_enabled():
        return "attn_mask requires a gradient, which our kernels do not compute"
    if dropout_p and is_capturing(query):
        return "a captured CUDA graph would drop the same pairs in every replay"
    return None


def trace_obstacle(*tensors: Tensor) -> str | None:
    """Return why nothing can be launched for these tensors now, whoever asks; or None."""
    if not all(type(tensor) is Tensor for tensor in tensors):
        return f"an argument is no plain tensor ({', '.join(type(tensor).__name__ for tensor in tensors)})"
    if any(tensor.is_nested for tensor in tensors):
        return "an argument is nested"
    if torch.compiler.is_compiling() or is_tracing() or dispatch_modes():
        return "the call is being traced or watched by a dispatch mode"
    if is_transformed():
        return "a functorch transform or forward-mode differentiation is active"
    return None


def is_transformed() -> bool:
    """Return whether tensors stand for others now, whose derivatives or batches PyTorch's own operators know."""
    return functorch_transform() is not None or forward_ad._current_level >= 0


def is_capturing(query: Tensor) -> bool:
    """Return whether the current stream records a CUDA graph."""
    return query.is_cuda and bool(torch.cuda.is_current_stream_capturing())


def autocasted(query: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Return the tensors as autocast gives them to scaled_dot_product_attention: floating-point ones in its lower
    precision, but for float64."""
    device = query.device.type
    if device not in AUTOCAST_DEVICES or not torch.is_autocast_enabled(device):
        return query, *others
    dtype = torch.get_autocast_dtype(device)
    return tuple(_converted(tensor, device, dtype) for tensor in (query, *others))


def _converted(tensor: Tensor | None, device: str, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or tensor.device.type != device or not tensor.is_floating_point():
        return tensor
    return tensor if tensor.dtype is torch.float64 else tensor.to(dtype)


def needs_gradients(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> bool:
    """Return whether autograd records this call."""
    tensors = (query, key, value) if sinks is None else (query, key, value, sinks)
    return is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def layout_obstacle(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> str | None:
    """Return why tensors of this kind go to PyTorch; or None. Everything checked here is in the plan's key."""
    return tensor_obstacle(query, key, value) or _size_obstacle(query, key, value, enable_gqa)


def is_short_cache(query: Tensor, key: Tensor) -> bool:
    """Return whether the keys are those of a cache of 8 bits, under queries of more."""
    return key.dtype in CACHE_TYPES and key.dtype != query.dtype


def tensor_obstacle(query: Tensor, key: Tensor, value: Tensor, *, cached: bool = False) -> str | None:
    """Return `layout_obstacle` as far as each tensor goes, whatever the sizes of the others. cached: keys and values
    may be of 8 bits."""
    tensors = (query, key, value)
    if any(tensor.device != query.device for tensor in tensors) or query.device.type != KERNEL_DEVICE:
        devices = sorted({str(tensor.device) for tensor in tensors})
        return f"the tensors must be on one {KERNEL_DEVICE} device, not {' and '.join(devices)}"
    kinds = {value.dtype} if cached and is_short_cache(query, key) else {query.dtype}
    if {key.dtype, value.dtype} != kinds or query.dtype not in DTYPE_NAMES:
        dtypes = sorted({str(tensor.dtype) for tensor in tensors})
        return f"the data type must be one of {', '.join(ELEMENT_BYTES)} for all, not {' and '.join(dtypes)}"
    if any(tensor.dim() != 4 for tensor in tensors):
        return "query, key and value must have four dimensions (batch, heads, length, head_dim)"
    if not all(tensor.numel() for tensor in tensors):
        return "a tensor is empty"
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        return "the last dimension must be contiguous"
    return None


def _size_obstacle(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> str | None:
    batch, heads, _, head_dim = query.shape
    heads_kv = key.shape[1]
    if key.shape[:3] != value.shape[:3] or key.shape[0] != batch or key.shape[3] != head_dim:
        sizes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
        return f"the sizes {sizes} need broadcasting or do not match"
    if heads != heads_kv and (not enable_gqa or heads % heads_kv):
        return f"{heads} query heads need {heads_kv} key heads times a whole number, and enable_gqa"
    return None


def scale_of(query: Tensor, scale: float | None) -> float:
    """Return the scale, or by default 1 / sqrt(head_dim); inf where queries have no elements, as PyTorch has it."""
    if scale is not None:
        return scale
    return query.shape[-1] ** -0.5 if query.shape[-1] else inf


def on_its_device(launch: Launch, index: int) -> Launch:
    """Return the launch with the tensors' device as the current one, which is where Triton launches. Itself with one
    GPU."""
    if torch.cuda.device_count() < 2:
        return launch

    def guarded(*arguments: Any) -> None:
        if torch.cuda.current_device() == index:
            launch(*arguments)
        else:
            with torch.cuda.device(index):
                launch(*arguments)

    return guarded


def in_order_of(query: Tensor, out: Tensor) -> Tensor:
    """Return the output with the dimension order of the query, without writing to memory: a transform may be
    watching."""
    strides = strides_like(query.stride(), out.shape)
    if out.stride() == strides:
        return out
    order = sorted(range(out.dim()), key=strides.__getitem__, reverse=True)
    return out.permute(order).contiguous().permute([order.index(dim) for dim in range(out.dim())])


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor with the strides of `like`."""
    return tensor if tensor.stride() == like.stride() else like.copy_(tensor)

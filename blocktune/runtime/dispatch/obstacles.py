"""Why PyTorch computes a call instead of our kernels: what the call is, how its tensors lie, and what watches it.

What a plan relies on is in its key (`Call.place`); what is `call_obstacle`'s is looked at in every call.
"""

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._functorch import peek_interpreter_stack as functorch_transform
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from blocktune.kernels.values.shape import ELEMENT_BYTES, FP8
from blocktune.kernels.values.short_numbers import CACHE_TYPES

KERNEL_DEVICE = "cuda"
META = "meta"

DTYPE_NAMES = {getattr(torch, name): name for name in ELEMENT_BYTES}
EIGHT_BITS = getattr(torch, FP8)


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
    if dropout_p and is_capturing(query):
        return "a captured CUDA graph would drop the same pairs in every replay"
    return None


def trace_obstacle(*tensors: Tensor) -> str | None:
    """Return why nothing can be launched for these tensors now, whoever asks; or None."""
    if not all(type(tensor) is Tensor for tensor in tensors):
        return f"an argument is no plain tensor ({', '.join(type(tensor).__name__ for tensor in tensors)})"
    if any(tensor.is_nested for tensor in tensors):
        return "an argument is nested"
    if any(tensor.device.type == META for tensor in tensors):
        return "an argument has no values"
    if torch.compiler.is_compiling() or is_tracing() or dispatch_modes():
        return "the call is being traced or watched by a dispatch mode"
    if is_transformed():
        return "a functorch transform or forward-mode differentiation is active"
    return None


def is_symbolic(query: Tensor) -> bool:
    """Return whether a call has sizes, but no values: a graph is traced, or the query is fake or on device meta."""
    return torch.compiler.is_compiling() or isinstance(query, FakeTensor) or query.device.type == META


def is_transformed() -> bool:
    """Return whether tensors stand for others now, whose derivatives or batches PyTorch's own operators know."""
    return functorch_transform() is not None or forward_ad._current_level >= 0


def is_capturing(query: Tensor) -> bool:
    """Return whether the current stream records a CUDA graph."""
    return query.is_cuda and bool(torch.cuda.is_current_stream_capturing())


def needs_gradients(*tensors: Tensor | None) -> bool:
    """Return whether autograd records a call with these tensors."""
    return is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def layout_obstacle(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> str | None:
    """Return why tensors of this kind go to PyTorch; or None. Everything checked here is in the plan's key."""
    return tensor_obstacle(query, key, value) or _size_obstacle(query, key, value, enable_gqa)


def tensor_obstacle(query: Tensor, key: Tensor, value: Tensor, *, cached: bool = False) -> str | None:
    """Return `layout_obstacle` as far as each tensor goes, whatever the sizes of the others. cached: keys and values
    may be of 8 bits."""
    tensors = (query, key, value)
    if any(tensor.device != query.device for tensor in tensors) or query.device.type not in (KERNEL_DEVICE, META):
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


def is_short_cache(query: Tensor, key: Tensor) -> bool:
    """Return whether the keys are an 8-bit cache's, under wider queries."""
    return key.dtype in CACHE_TYPES and key.dtype != query.dtype

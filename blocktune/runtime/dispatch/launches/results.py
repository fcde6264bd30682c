"""Memory for the results of a launch, laid out as PyTorch's attention lays out its own."""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from blocktune.runtime.dispatch.obstacles import EIGHT_BITS


def new_results(query: Tensor, value: Tensor, *, packed: bool, sums: bool) -> tuple[Tensor, Tensor | None]:
    """Return memory for the output, in the dimension order of the query, and for the log-sum-exp if it is wanted.

    The log-sum-exp is float32 [batch, num_heads, seqlen_q], or [num_heads, tokens] of packed sequences. No kernel
    writes outside all sequences, so there the output is 0 and the log-sum-exp -inf.
    """
    out = empty_output(query, value.shape[-1])
    if packed:
        out.zero_()
        return out, query.new_full(query.shape[1:3], float("-inf"), dtype=torch.float32) if sums else None
    return out, torch.empty(query.shape[:3], dtype=torch.float32, device=query.device) if sums else None


def new_gradients(query: Tensor, key: Tensor, value: Tensor, *, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the gradients: dense, in the dimension order of what they belong to; 0 outside packed
    sequences."""
    dq, dk, dv = (dense_like(tensor) for tensor in (query, key, value))
    return (dq.zero_(), dk.zero_(), dv.zero_()) if packed else (dq, dk, dv)


def empty_output(query: Tensor, head_dim_v: int) -> Tensor:
    """Return a new output with the dimension order of the query, as SDPA's has; bfloat16 of 8-bit tensors."""
    is_short = query.dtype is EIGHT_BITS
    dtype = torch.bfloat16 if is_short else query.dtype
    if head_dim_v == query.shape[-1]:
        return dense_like(query, dtype)
    shape = (*query.shape[:-1], head_dim_v)
    return query.new_empty_strided(shape, strides_like(query.stride(), shape), dtype=dtype)


def dense_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return `torch.empty_like`, but with elements of a row next to each other where those of the tensor are: PyTorch
    puts them apart where rows overlap, as windows over a signal do."""
    made = torch.empty_like(tensor, dtype=dtype)
    if made.stride(-1) == 1 or tensor.stride(-1) != 1:
        return made
    return made.new_empty_strided(made.shape, strides_like(tensor.stride(), made.shape))


def strides_like(strides: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor of this shape whose dimensions follow each other as in `strides`.

    A broadcast dimension (stride 0) has no place in memory and comes last. Where strides are equal, as where rows
    overlap, later dimensions have the smaller ones.
    """
    dense, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim] or inf, -dim)):
        dense[dim] = step
        step *= shape[dim]
    return tuple(dense)


def permute_like(query: Tensor, out: Tensor) -> Tensor:
    """Return the output with the dimension order of the query, without writing to memory: a transform may be
    watching."""
    strides = strides_like(query.stride(), out.shape)
    if out.stride() == strides:
        return out
    order = sorted(range(out.dim()), key=strides.__getitem__, reverse=True)
    return out.permute(order).contiguous().permute([order.index(dim) for dim in range(out.dim())])


def with_strides_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor with the strides of `like`."""
    return tensor if tensor.stride() == like.stride() else like.copy_(tensor)

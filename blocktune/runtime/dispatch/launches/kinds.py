"""The tensor properties that a plan depends on, besides their values: they make up the plan's key."""

from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.base.feature_arguments import broadcast_strides
from blocktune.kernels.base.precision import allows_tf32

ALIGNMENT_BYTES = 16


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


def packed_kind(tensor: Tensor) -> tuple[Any, ...]:
    """Return all of a tensor [1, heads, tokens, dim] but how many tokens there are; that too where the heads are not
    within a token: in the results, whose strides a plan has pinned, all tokens are between two heads then."""
    aligned = tensor.data_ptr() % ALIGNMENT_BYTES == 0
    _, heads, tokens, dim = tensor.shape
    strides = tensor.stride()
    between = 0 if heads == 1 or 0 < strides[1] < strides[2] else tokens
    return heads, between, dim, strides, tensor.dtype, tensor.device, aligned


def extra_kind(tensor: Tensor) -> tuple[Any, ...]:
    """Return all of a tensor of the extras but its sizes, which follow from the others, and the strides of those of
    1."""
    aligned = tensor.data_ptr() % ALIGNMENT_BYTES == 0
    return broadcast_strides(tensor, tensor.dim()), tensor.dtype, tensor.device, aligned


def tokens_kind(tokens: int, num_heads: int) -> tuple[bool, ...]:
    """Return what compiled code knows about the log-sum-exp's strides [num_heads, tokens] for packed sequences."""
    return tokens % ALIGNMENT_BYTES == 0, tokens * num_heads % ALIGNMENT_BYTES == 0, tokens == 1


def rounds_products(query: Tensor) -> bool:
    """Return whether products of such tensors round their factors now: our kernels are compiled for either."""
    return query.dtype is torch.float32 and allows_tf32()

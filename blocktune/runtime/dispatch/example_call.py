"""The call of a shape that a dispatcher makes itself, to warm up."""

from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.values.errors import NoDeviceError, UsageError
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import FP8, AttentionShape, Causal, Direction, require_shape
from blocktune.runtime.dispatch import obstacles


def require_callable(shape: AttentionShape) -> None:
    """Check that a call of `attention` can have this shape.

    Raises:
        UsageError: none can.
    """
    require_shape(shape)
    if shape.dtype == FP8:
        raise UsageError(
            f"`attention` takes no 8-bit tensors, but got {shape.label}. Warm up with a call of attention_fp8."
        )
    if shape.causal is Causal.LOWER_RIGHT and shape.seqlen_q != shape.seqlen_k:
        raise UsageError(
            f"`attention` aligns the causal mask to the upper left, but got {shape.label}. Warm up another shape."
        )


def require_gpu() -> None:
    """Check that there is a GPU to call on.

    Raises:
        NoDeviceError: PyTorch sees none.
    """
    if obstacles.KERNEL_DEVICE == "cuda" and not torch.cuda.is_available():
        raise NoDeviceError(
            "Warming up runs kernels on a GPU, but PyTorch sees none here. Call it where the model runs; "
            "`explain(shape, device=...)` answers for a device that is not here."
        )


def example_tensors(shape: AttentionShape, *, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of this shape on the current GPU; transposed: laid out [batch, length, heads,
    head_dim]."""

    def example(heads: int, length: int, dim: int) -> Tensor:
        sizes = (shape.batch, length, heads, dim) if transposed else (shape.batch, heads, length, dim)
        tensor = torch.zeros(sizes, dtype=getattr(torch, shape.dtype), device=obstacles.KERNEL_DEVICE)
        tensor = tensor.transpose(1, 2) if transposed else tensor
        return tensor.requires_grad_(shape.direction is Direction.BACKWARD)

    return (
        example(shape.num_heads, shape.seqlen_q, shape.head_dim),
        example(shape.num_heads_kv, shape.seqlen_k, shape.head_dim),
        example(shape.num_heads_kv, shape.seqlen_k, shape.head_dim_v),
    )


def example_options(shape: AttentionShape) -> dict[str, Any]:
    """Return what a call of this shape passes besides the tensors.

    Raises:
        UsageError: it is nothing that PyTorch's signature has.
    """
    features = shape.features
    if features.names - {MaskKind.BOOLEAN, MaskKind.ADDITIVE, "dropout"}:
        raise UsageError(
            f"`attention` serves masks and dropout alone, but got {features.label!r}. Call the entry point that "
            "serves these features once instead."
        )
    options: dict[str, Any] = {"is_causal": shape.causal is not Causal.NONE, "enable_gqa": shape.group_size > 1}
    if features.mask is not MaskKind.NONE:
        dtype = torch.bool if features.mask is MaskKind.BOOLEAN else getattr(torch, shape.dtype)
        options["attn_mask"] = torch.ones(shape.seqlen_q, shape.seqlen_k, dtype=dtype, device=obstacles.KERNEL_DEVICE)
    return options | ({"dropout_p": 0.5} if features.dropout else {})

"""The arguments of PyTorch's attention as a `Call` of ours, and what stands for them in a compiled graph."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from blocktune.kernels.dispatch import custom_ops as ops
from blocktune.kernels.dispatch.call import Call
from blocktune.kernels.dispatch.call_checks import check_dropout, check_mask
from blocktune.kernels.dispatch.plan import autocasted, layout_obstacle, scale_of
from blocktune.kernels.dispatch.torch_attention import sound_attention, with_positive_scale
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import Causal


def check_options(attn_mask: Tensor | None, dropout_p: float, is_causal: bool) -> None:
    """Raises:
    UsageError: both attn_mask and is_causal are given, or dropout_p is outside [0, 1).
    """
    if attn_mask is not None and is_causal:
        raise UsageError(
            "Only one of `attn_mask` and `is_causal` can be given, but got both. Put the triangle in the mask."
        )
    check_dropout(dropout_p)


def call_of(
    query: Tensor, key: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Call:
    """The call with these arguments, of tensors with four dimensions and a mask that `check_mask` has seen."""
    if mask is None and not dropout_p:
        return _plain_call(is_causal, scale_of(query, scale), torch.are_deterministic_algorithms_enabled())
    return Call.of(**_asked(query, key, mask, dropout_p, is_causal, scale))


@lru_cache(maxsize=256)
def _plain_call(is_causal: bool, scale: float, deterministic: bool) -> Call:
    """That of a training step, which has nothing in it that is new."""
    causal = Causal.UPPER_LEFT if is_causal else Causal.NONE
    return Call.of(causal=causal, scale=scale, deterministic=deterministic)


def _asked(
    query: Tensor, key: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> dict[str, Any]:
    """The arguments as those of `Call.of`."""
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask.expand(-1, -1, -1, key.shape[2])
    return {
        "causal": Causal.UPPER_LEFT if is_causal else Causal.NONE,
        "scale": scale_of(query, scale),
        "dropout_p": dropout_p,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "mask": mask,
    }


def traced_attention(
    dispatcher: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Return what stands in a compiled graph: the op with the plans of a dispatcher, which `registered` numbered, or
    PyTorch's where no kernel takes such tensors."""
    check_options(attn_mask, dropout_p, is_causal)
    query, key, value, attn_mask = autocasted(query, key, value, attn_mask)
    query, scale = with_positive_scale(query, scale)
    if _stays_pytorchs(query, key, value, attn_mask, enable_gqa):
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        return sound_attention(*given, scale=scale, enable_gqa=enable_gqa)
    asked = _asked(query, key, attn_mask, dropout_p, is_causal, scale)
    return ops.attend(query, key, value, dispatcher=dispatcher, lse=False, **asked)[0]


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether it is more than a tensor: distributed, nested, quantized. While dynamo traces, the type is the user's; a
    graph that is exported without it has fakes."""
    if is_dynamo_compiling():
        return type(tensor) not in (Tensor, Parameter)
    return bool(is_traceable_wrapper_subclass(tensor))


def _stays_pytorchs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> bool:
    """Whether a graph that is traced with these tensors calls PyTorch's attention."""
    tensors = [query, key, value] if mask is None else [query, key, value, mask]
    if any(_is_wrapped(tensor) for tensor in tensors):
        return True
    if mask is not None:
        if mask.requires_grad or mask.device != query.device:
            return True
        check_mask(mask, query, key)
    return layout_obstacle(query, key, value, enable_gqa) is not None

"""The arguments of PyTorch's attention, what PyTorch converts them to, and the `Call` that they make."""

from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.call_checks import check_mask
from blocktune.runtime.dispatch.obstacles import call_obstacle, layout_obstacle

AUTOCAST_DEVICES = ("cpu", "cuda")
"""Where autocast may be on; a constant, since Dynamo of PyTorch 2.11 cannot trace the question."""

NUMBERS = (float, int, torch.SymFloat, torch.SymInt)
"""What may stand where PyTorch's signature says float, and needs no conversion."""

TINY = 2.0**-64
"""A scale for scores that are 0 anyway: no gradient of the query overflows before it is multiplied by 0."""


class SdpaArguments(NamedTuple):
    """The arguments of PyTorch's attention, in its order."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def make_call(given: SdpaArguments) -> tuple[SdpaArguments, Call | str]:
    """Return the arguments as PyTorch converts them, with a positive scale, and the call that they make; or why PyTorch
    computes it whatever the configs are.

    Raises:
        UsageError: dropout_p is outside [0, 1], or the mask has a wrong type or shape.
    """
    given = convert(rescale(given))
    query, key, value, attn_mask, dropout_p, *_ = given
    obstacle = (
        call_obstacle(query, key, value, attn_mask, dropout_p)
        or layout_obstacle(query, key, value, given.enable_gqa)  # PyTorch judges the options of what it computes
        or options_obstacle(given)
    )
    if obstacle is not None:
        return given, obstacle
    if attn_mask is None and not dropout_p:
        return given, plain_call(given)
    if attn_mask is not None:
        check_mask(attn_mask, query, key)
    return given, Call.of(**call_arguments(given))


def plain_call(given: SdpaArguments) -> Call:
    """Return the call with these arguments, which has neither mask nor dropout."""
    scale = scale_of(given.query, given.scale)
    return _plain_call(given.is_causal, scale, torch.are_deterministic_algorithms_enabled())


@lru_cache(maxsize=256)
def _plain_call(is_causal: bool, scale: float, deterministic: bool) -> Call:
    """Return the call of a training step, which has nothing in it that is new."""
    causal = Causal.UPPER_LEFT if is_causal else Causal.NONE
    return Call.of(causal=causal, scale=scale, deterministic=deterministic)


def call_arguments(given: SdpaArguments) -> dict[str, Any]:
    """Return the arguments as those of `Call.of`."""
    return {
        "causal": Causal.UPPER_LEFT if given.is_causal else Causal.NONE,
        "scale": scale_of(given.query, given.scale),
        "dropout_p": given.dropout_p,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "mask": None if given.attn_mask is None else mask_of_scores(given.attn_mask, given.key.shape[2]),
    }


def type_obstacle(given: SdpaArguments) -> str | None:
    """Return why PyTorch answers a call with arguments of these types, or None where they are those of its signature.

    It raises a TypeError, unless it can convert them: a number of NumPy, a tensor of one number.
    """
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = given
    if (
        isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and (attn_mask is None or isinstance(attn_mask, Tensor))
        and isinstance(dropout_p, NUMBERS)
        and isinstance(is_causal, bool)
        and (scale is None or isinstance(scale, NUMBERS))
        and isinstance(enable_gqa, bool)
    ):
        return None
    kinds = ", ".join(type(argument).__name__ for argument in given)
    return f"an argument is of another type than in PyTorch's signature ({kinds}), which PyTorch refuses or converts"


def options_obstacle(given: SdpaArguments) -> str | None:
    """Return why PyTorch answers a call with these options, whatever its tensors are; or None.

    Raises:
        UsageError: dropout_p is outside [0, 1].
    """
    if not 0.0 <= given.dropout_p <= 1.0:
        raise UsageError(
            f"`0 <= dropout_p <= 1` must hold, but got dropout_p={given.dropout_p}. Give the share of the pairs to "
            "drop."
        )
    if given.attn_mask is not None and given.is_causal:
        return (
            "attn_mask and is_causal are given together: PyTorch computes both or refuses them, by version and backend"
        )
    return "all pairs are dropped" if given.dropout_p == 1.0 else None


def convert(given: SdpaArguments) -> SdpaArguments:
    """Return the arguments with the tensors that autocast gives PyTorch's attention."""
    query, key, value, attn_mask = autocast_tensors(*given[:4])
    return given._replace(query=query, key=key, value=value, attn_mask=attn_mask)


def rescale(given: SdpaArguments) -> SdpaArguments:
    """Return arguments of the same call with a positive scale, or none (`with_positive_scale`)."""
    scale = given.scale
    if scale is not None and not isinstance(scale, torch.SymFloat):
        scale = float(scale)  # kernels are compiled for floats
    query, scale = with_positive_scale(given.query, scale)
    return given._replace(query=query, scale=scale)


def autocast_tensors(query: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Return the tensors as autocast gives them to scaled_dot_product_attention: floating-point ones in its lower
    precision, but for float64."""
    device = query.device.type
    if device not in AUTOCAST_DEVICES or not torch.is_autocast_enabled(device):
        return query, *others
    dtype = torch.get_autocast_dtype(device)
    return tuple(_convert(tensor, device, dtype) for tensor in (query, *others))


def _convert(tensor: Tensor | None, device: str, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or tensor.device.type != device or not tensor.is_floating_point():
        return tensor
    return tensor if tensor.dtype is torch.float64 else tensor.to(dtype)


def with_positive_scale(query: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """Return the query and scale with the same products, and a scale above 0 (None stays None): what a negative scale
    does is done to the query, exactly, and its gradient goes the same way."""
    if scale is None or scale > 0:
        return query, scale
    if scale < 0:
        return -query, -scale
    return query * scale, TINY  # 0 or NaN


def scale_of(query: Tensor, scale: float | None) -> float:
    """Return the scale, or by default 1 / sqrt(head_dim); inf where queries have no elements, as PyTorch has it."""
    if scale is not None:
        return scale
    return query.shape[-1] ** -0.5 if query.shape[-1] else inf


def mask_of_scores(mask: Tensor, seqlen_k: int) -> Tensor:
    """Return the mask as [batch or 1, heads or 1, seqlen_q or 1, seqlen_k]."""
    if mask.dim() == 4 and mask.shape[3] == seqlen_k:
        return mask
    return mask.expand(*(1,) * (4 - mask.dim()), *mask.shape[:-1], seqlen_k)

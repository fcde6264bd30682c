"""The arguments of PyTorch's attention as a `Call` of ours, and what stands for them in a compiled graph.

Dynamo guards all that it traces, and checks the guards in every call of the graph: 60 ns for each function, constant
and name. So it sees only what raises errors, and one op, `blocktune::scaled_dot_product_attention`. That op is made of
others, which become known when its graph is traced for autograd: `blocktune::attention_plain` for calls without
gradients, masks and dropout, those of graphs/ops.py, or PyTorch's.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from blocktune.kernels.dispatch.call import Call
from blocktune.kernels.dispatch.call_checks import check_mask
from blocktune.kernels.dispatch.graphs.attend import attend
from blocktune.kernels.dispatch.graphs.engines import engine_of
from blocktune.kernels.dispatch.graphs.ops import DEVICES, INPUTS, LIBRARY
from blocktune.kernels.dispatch.plan import (
    autocasted,
    empty_output,
    is_transformed,
    layout_obstacle,
    needs_gradients,
    scale_of,
)
from blocktune.kernels.dispatch.torch_attention import (
    scaled_dot_product_attention,
    sound_attention,
    with_positive_scale,
)
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import Causal

NUMBERS = (float, int, torch.SymFloat, torch.SymInt)
"""What may stand where PyTorch's signature says float, and needs no conversion."""


def type_obstacle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str | None:
    """Return why PyTorch answers a call with arguments of these types, or None where they are those of its signature.

    It raises a TypeError, unless it can convert them: a number of NumPy, a tensor of one number.
    """
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
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    kinds = ", ".join(type(argument).__name__ for argument in arguments)
    return f"an argument is of another type than in PyTorch's signature ({kinds}), which PyTorch refuses or converts"


def options_obstacle(attn_mask: Tensor | None, dropout_p: float, is_causal: bool) -> str | None:
    """Return why PyTorch answers a call with these options, whatever its tensors are; or None.

    Raises:
        UsageError: dropout_p is outside [0, 1].
    """
    if not 0.0 <= dropout_p <= 1.0:
        raise UsageError(
            f"`0 <= dropout_p <= 1` must hold, but got dropout_p={dropout_p}. Give the share of the pairs to drop."
        )
    if attn_mask is not None and is_causal:
        return (
            "attn_mask and is_causal are given together: PyTorch computes both or refuses them, by version and backend"
        )
    return "all pairs are dropped" if dropout_p == 1.0 else None


def call_of(
    query: Tensor, key: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Call:
    """Return the call with these arguments, of tensors with four dimensions and a mask that `check_mask` has seen."""
    if mask is None and not dropout_p:
        return _plain_call(is_causal, scale_of(query, scale), torch.are_deterministic_algorithms_enabled())
    return Call.of(**_asked(query, key, mask, dropout_p, is_causal, scale))


@lru_cache(maxsize=256)
def _plain_call(is_causal: bool, scale: float, deterministic: bool) -> Call:
    """Return the call of a training step, which has nothing in it that is new."""
    causal = Causal.UPPER_LEFT if is_causal else Causal.NONE
    return Call.of(causal=causal, scale=scale, deterministic=deterministic)


def _asked(
    query: Tensor, key: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> dict[str, Any]:
    """Return the arguments as those of `Call.of`."""
    return {
        "causal": Causal.UPPER_LEFT if is_causal else Causal.NONE,
        "scale": scale_of(query, scale),
        "dropout_p": dropout_p,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "mask": None if mask is None else mask_of_scores(mask, key.shape[2]),
    }


def mask_of_scores(mask: Tensor, seqlen_k: int) -> Tensor:
    """Return the mask as [batch or 1, heads or 1, seqlen_q or 1, seqlen_k]."""
    if mask.dim() == 4 and mask.shape[3] == seqlen_k:
        return mask
    return mask[(None,) * (4 - mask.dim())].expand(-1, -1, -1, seqlen_k)


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
    PyTorch's for arguments that are more than plain tensors and numbers.

    Raises:
        UsageError: key and value differ in length, dropout_p is outside [0, 1], or the mask has a wrong type or shape.
    """
    is_usual = (  # all in one place, by names that are there anyway
        type(query) is Tensor
        and type(key) is Tensor
        and type(value) is Tensor
        and attn_mask is None
        and type(dropout_p) is float
        and 0.0 <= dropout_p < 1.0
        and type(is_causal) is bool
        and type(enable_gqa) is bool
        and (scale is None or type(scale) is float)
    )
    if not is_usual:
        found = _unusual(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if found is not None:
            return found
    out: Tensor = ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, dispatcher)
    return out


def _unusual(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:
    """Return PyTorch's attention of arguments that the op does not take; None if it does.

    Raises:
        UsageError: key and value differ in length, dropout_p is outside [0, 1], or the mask has a wrong type or shape.
    """
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    if type_obstacle(*given, scale, enable_gqa) is not None:
        if _differ_in_length(key, value):  # without keys PyTorch says what it has against the types
            nothing = (query, key[..., :0, :], value[..., :0, :], attn_mask, dropout_p, is_causal)
            scaled_dot_product_attention(*nothing, scale=scale, enable_gqa=enable_gqa)
        _check_lengths(key, value)
        return scaled_dot_product_attention(*given, scale=scale, enable_gqa=enable_gqa)
    _check_lengths(key, value)
    query, key, value, attn_mask = autocasted(query, key, value, attn_mask)
    stays = _stays_pytorchs(query, key, value, attn_mask, enable_gqa)
    if not stays and options_obstacle(attn_mask, dropout_p, is_causal) is None:
        if attn_mask is not None:
            check_mask(attn_mask, query, key)
        return None
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    return sound_attention(*given, scale=scale, enable_gqa=enable_gqa)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dispatcher: int,
) -> Tensor:
    """Return attention by the ops that `blocktune::scaled_dot_product_attention` is made of.

    Raises:
        UsageError: key and value differ in length.
    """
    _check_lengths(key, value)
    query, key, value, attn_mask = autocasted(query, key, value, attn_mask)
    query, scale = with_positive_scale(query, scale)
    if is_transformed() or _stays_pytorchs(query, key, value, attn_mask, enable_gqa):
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        return sound_attention(*given, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is None and not dropout_p and not needs_gradients(query, key, value):
        out: Tensor = PLAIN(query, key, value, is_causal, scale_of(query, scale), enable_gqa, dispatcher)
        return out
    asked = _asked(query, key, attn_mask, dropout_p, is_causal, scale)
    return attend(query, key, value, dispatcher=dispatcher, lse=False, **asked)[0]


def _plain(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float, enable_gqa: bool, dispatcher: int
) -> Tensor:
    engine: Any = engine_of(dispatcher)
    out: Tensor = engine.plain(query, key, value, is_causal, scale, enable_gqa)
    return out


def _fake_plain(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
    del key, options
    return empty_output(query, value.shape[-1])


def _check_lengths(key: Tensor, value: Tensor) -> None:
    """Check that there is a value for each key: a graph leaves the backend to PyTorch, whose fused one does not look.

    Raises:
        UsageError: there is not.
    """
    if _differ_in_length(key, value):
        lengths = f"{key.shape[-2]} and {value.shape[-2]}"
        raise UsageError(f"key and value must have one length, but got {lengths}. Give a value for each key.")


def _differ_in_length(key: Tensor, value: Tensor) -> bool:
    """Return whether both are tensors with a number of rows, and these are not the same."""
    if not isinstance(key, Tensor) or not isinstance(value, Tensor) or key.is_nested or value.is_nested:
        return False
    return bool(key.dim() > 1 and value.dim() > 1 and key.shape[-2] != value.shape[-2])


def _is_wrapped(tensor: Tensor) -> bool:
    """Return whether it is more than a tensor: distributed, nested, quantized. While dynamo traces, the type is the
    user's; a graph that is exported without it has fakes."""
    if is_dynamo_compiling():
        return type(tensor) not in (Tensor, Parameter)
    return bool(is_traceable_wrapper_subclass(tensor))


def _stays_pytorchs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> bool:
    """Return whether a graph that is traced with these tensors calls PyTorch's attention."""
    tensors = [query, key, value] if mask is None else [query, key, value, mask]
    if any(_is_wrapped(tensor) for tensor in tensors):
        return True
    if mask is not None and (mask.requires_grad or mask.device != query.device or mask.layout is not torch.strided):
        return True
    return layout_obstacle(query, key, value, enable_gqa) is not None


def _define() -> tuple[Any, Any]:
    """Define the ops, and return `scaled_dot_product_attention` and `attention_plain`."""
    LIBRARY.define(
        f"scaled_dot_product_attention({INPUTS}, Tensor? attn_mask, float dropout_p, bool is_causal, float? scale, "
        "bool enable_gqa, int dispatcher) -> Tensor"
    )
    LIBRARY.define(f"attention_plain({INPUTS}, bool is_causal, float scale, bool enable_gqa, int dispatcher) -> Tensor")
    LIBRARY.impl("scaled_dot_product_attention", _attention, "CompositeImplicitAutograd")
    for device in DEVICES:
        LIBRARY.impl("attention_plain", _plain, device)
    torch.library.register_fake("blocktune::attention_plain", _fake_plain, lib=LIBRARY)
    own = torch.ops.blocktune
    return own.scaled_dot_product_attention.default, own.attention_plain.default


ATTENTION, PLAIN = _define()

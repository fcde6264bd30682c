"""The ops that replace PyTorch's attention in a compiled graph.

Dynamo guards all that it traces, and checks the guards in every call of the graph: 60 ns for each function, constant
and name. So it sees only what raises errors, and one op, `blocktune::scaled_dot_product_attention`, with the arguments
one by one: `SdpaArguments`, which holds them everywhere else, would be one more name. That op is made of others, which
become known when its graph is traced for autograd: `blocktune::attention_plain` for calls without gradients, masks and
dropout, whose few arguments cost little to pass, those of ops.py, or PyTorch's.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.flop_counter import register_flop_formula

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.dispatch.call_checks import check_mask
from blocktune.runtime.dispatch.graphs.attend import attend
from blocktune.runtime.dispatch.graphs.engines import engine_of
from blocktune.runtime.dispatch.graphs.flops import plain_flops
from blocktune.runtime.dispatch.graphs.ops import DEVICES, INPUTS, LIBRARY, NAMESPACE, OPS
from blocktune.runtime.dispatch.launches.results import empty_output
from blocktune.runtime.dispatch.obstacles import is_transformed, layout_obstacle, needs_gradients
from blocktune.runtime.dispatch.sdpa_arguments import (
    SdpaArguments,
    call_arguments,
    convert,
    options_obstacle,
    rescale,
    scale_of,
    type_obstacle,
)
from blocktune.runtime.dispatch.torch_attention import call_sdpa, sound_attention


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
    is_usual = (  # in one expression on local names: Dynamo traces it, and an eager call pays for every lookup
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
        found = _unusual(SdpaArguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
        if found is not None:
            return found
    out: Tensor = ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, dispatcher)
    return out


def _unusual(given: SdpaArguments) -> Tensor | None:
    """Return PyTorch's attention of arguments that the op does not take; None if it does.

    Raises:
        UsageError: key and value differ in length, dropout_p is outside [0, 1], or the mask has a wrong type or shape.
    """
    query, key, value, *_ = given
    if type_obstacle(given) is not None:
        if _differ_in_length(key, value):  # without keys PyTorch says what it has against the types
            call_sdpa(SdpaArguments(query, key[..., :0, :], value[..., :0, :], *given[3:]))
        _check_lengths(key, value)
        return call_sdpa(given)
    _check_lengths(key, value)
    given = convert(given)
    if _stays_pytorchs(given) or options_obstacle(given) is not None:
        return sound_attention(given)
    if given.attn_mask is not None:
        check_mask(given.attn_mask, given.query, given.key)
    return None


def _attention(*arguments: Any) -> Tensor:
    """Return attention by the ops that `blocktune::scaled_dot_product_attention` is made of.

    Args:
        arguments: those of PyTorch's attention, and the number of the dispatcher.

    Raises:
        UsageError: key and value differ in length.
    """
    given, dispatcher = SdpaArguments(*arguments[:-1]), arguments[-1]
    _check_lengths(given.key, given.value)
    given = convert(rescale(given))
    query, key, value, attn_mask, *_ = given
    if is_transformed() or _stays_pytorchs(given):
        return sound_attention(given)
    if attn_mask is None and not given.dropout_p and not needs_gradients(query, key, value):
        scale = scale_of(query, given.scale)
        out: Tensor = PLAIN(query, key, value, given.is_causal, scale, given.enable_gqa, dispatcher)
        return out
    return attend(query, key, value, dispatcher=dispatcher, lse=False, **call_arguments(given))[0]


def _plain(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float, enable_gqa: bool, dispatcher: int
) -> Tensor:
    engine: Any = engine_of(dispatcher)
    out: Tensor = engine.plain(SdpaArguments(query, key, value, None, 0.0, is_causal, scale, enable_gqa))
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


def _stays_pytorchs(given: SdpaArguments) -> bool:
    """Return whether a graph that is traced with these tensors calls PyTorch's attention."""
    query, key, value, mask, *_ = given
    if any(tensor is not None and _is_wrapped(tensor) for tensor in given[:4]):
        return True
    if mask is not None and (mask.device != query.device or mask.layout is not torch.strided):
        return True
    if query.is_meta and not 0.0 <= given.dropout_p <= 1.0:
        return True  # without numbers PyTorch drops any share
    return layout_obstacle(query, key, value, given.enable_gqa) is not None


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
    torch.library.register_fake(f"{NAMESPACE}::attention_plain", _fake_plain, lib=LIBRARY)
    register_flop_formula(OPS.attention_plain, get_raw=True)(plain_flops)
    return OPS.scaled_dot_product_attention.default, OPS.attention_plain.default


ATTENTION, PLAIN = _define()

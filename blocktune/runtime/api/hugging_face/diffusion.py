"""Attention for Hugging Face diffusers: a backend of its dispatcher, for images and videos.

Its models call (`models/attention_dispatch.py` of diffusers is the pattern) with [batch, tokens, heads, head_dim], not
causal, and at times with a mask of the keys that text leaves empty.
"""

from enum import Enum
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor

from blocktune.runtime.api.flash_attn import flash_attn_func
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention

NAME = "blocktune"


def register_with_diffusers(*, dispatcher: Dispatcher = attention) -> str:
    """Make a backend of diffusers' attention use the dispatcher, and return its name.

        pipe.transformer.set_attention_backend(register_with_diffusers())

    `attention_backend` of `diffusers.models.attention_dispatch` takes the name as well. Registering again is harmless.

    Raises:
        ImportError: diffusers is not installed, or older than its dispatcher.
    """
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError as error:
        raise ImportError(
            f"`register_with_diffusers` needs diffusers 0.42 or newer: {error}. Install it with `pip install "
            "'blocktune[diffusers]'`."
        ) from error
    serving = update_wrapper(partial(diffusers_attention, dispatcher=dispatcher), diffusers_attention)
    register = _AttentionBackendRegistry.register(_member(AttentionBackendName))
    register(diffusers_attention if dispatcher is attention else serving)
    return NAME


def _member(names: Any) -> Any:
    """Return our member of the enumeration of backends, which takes no others once it is made by its own means."""
    if NAME not in names._value2member_map_:
        member: Enum = str.__new__(names, NAME)  # a `str` of this class
        member._name_, member._value_ = NAME.upper(), NAME
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = names._value2member_map_[NAME] = member
    return names._value2member_map_[NAME]


def diffusers_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
    *,
    dispatcher: Dispatcher = attention,
) -> Tensor:
    """Return attention as a model of diffusers asks for it: the output [batch, tokens, heads, head_dim].

    attn_mask: [batch, keys], or what broadcasts to [batch, heads, queries, keys]; True where a query sees a key, or
    added to the scores.

    Raises:
        NotImplementedError: the model is split over ranks by diffusers' own context parallelism.
        UsageError: tensors do not fit each other, or an argument is out of range.
    """
    if _parallel_config is not None:
        raise NotImplementedError(
            "diffusers' context parallelism is not served by blocktune. Take the backend 'native' for it."
        )
    if attn_mask is None and not is_causal:
        out = flash_attn_func(query, key, value, dropout_p, scale, dispatcher=dispatcher)
        assert isinstance(out, Tensor)  # no log-sum-exp was wanted
        return out
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return dispatcher(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa).transpose(1, 2)

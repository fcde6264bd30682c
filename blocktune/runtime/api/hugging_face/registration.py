"""Registers attention with transformers: the function and the mask function that its models call by name."""

from collections.abc import Iterator
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor
from torch.compiler import assume_constant_result

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.api.hugging_face.attention import transformers_attention
from blocktune.runtime.api.hugging_face.continuous_batching import accept_in_batches
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention

DEFAULT_NAME = "blocktune"

TRAPS = ("flash", "sdpa", "flex_attention", "eager", "paged|", "/")
"""Parts of a name that transformers gives a meaning to: other masks, other checks, or a download."""


def register_with_transformers(name: str = DEFAULT_NAME, *, dispatcher: Dispatcher = attention) -> str:
    """Make `attn_implementation=name` of any model use the dispatcher, and return the name.

        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register_with_transformers())

    Both the attention and the mask function are registered: without the second one transformers makes no masks, and
    padding would be ignored silently. `generate_batch` takes the name as well. Registering again is harmless.

    Raises:
        UsageError: transformers would take the name for something else.
        ImportError: transformers is not installed, or older than its attention interface (4.53).
    """
    trap = next((part for part in TRAPS if part in name), None)
    if trap is not None or not name:
        raise UsageError(
            f"{name!r} cannot name an attention in transformers, where names with {', '.join(TRAPS)} in them have a "
            f"meaning of their own. Use the default, {DEFAULT_NAME!r}."
        )
    try:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ImportError as error:
        raise ImportError(
            f"`register_with_transformers` needs transformers 4.53 or newer: {error}. Install it with `pip install "
            "'blocktune[huggingface]'`."
        ) from error

    serving = update_wrapper(partial(transformers_attention, dispatcher=dispatcher), transformers_attention)
    AttentionInterface.register(name, transformers_attention if dispatcher is attention else serving)
    AttentionMaskInterface.register(name, transformers_mask)
    accept_in_batches(name)
    return name


def transformers_mask(*arguments: Any, config: Any = None, **options: Any) -> Tensor | None:
    """Return a mask as the models of a config expect it: boolean, or added to the scores where they know no other one.

    Such a model may append a part of its own to the mask that its layers get, as DeepSeek V4 does.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    mask_of = eager_mask if config is not None and adds_masks(type(config)) else sdpa_mask
    mask: Tensor | None = mask_of(*arguments, config=config, **options)
    return mask


@assume_constant_result  # type: ignore[untyped-decorator]
def adds_masks(config: type) -> bool:
    """Return whether the models of this kind of config serve no attention but `eager`, whose mask is additive.

    Gemma 2 and GPT-OSS refuse `sdpa`, too, but for their soft caps and sinks: they serve FlashAttention, which has no
    mask that a layer could add to.
    """
    from transformers import PreTrainedModel

    classes = [each for each in _subclasses(PreTrainedModel) if each.config_class is config]
    # the second name of flash attention is that of transformers before 4.54
    names = "_supports_sdpa", "_supports_flash_attn", "_supports_flash_attn_2", "_supports_flex_attn"
    return bool(classes) and not any(getattr(each, name, False) for each in classes for name in names)


def _subclasses(base: Any) -> Iterator[Any]:
    for each in base.__subclasses__():
        yield each
        yield from _subclasses(each)

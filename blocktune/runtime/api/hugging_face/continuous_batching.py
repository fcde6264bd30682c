"""Lets transformers' continuous batching, `generate_batch`, take attention under our names.

It takes `sdpa`, `paged|eager` and implementations with `flash` in their name, and asks a function of transformers which
they are. A name with `flash` is no way out: models that know only certain ones, such as GPT-OSS, would download one of
these. So the function answers yes for our names, in the modules of continuous batching alone.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from blocktune.runtime.api.flash_attn import flash_attn_func, flash_attn_varlen_func
from blocktune.runtime.api.kv_cache import flash_attn_with_kvcache

PACKAGE = "transformers.generation.continuous_batching"
ASK, LOAD = "is_flash_attention_requested", "lazy_import_flash_attention"

FIRST = (5, 23)
"""The version of transformers with the keywords that `packed_batches` reads."""

FUNCTIONS = (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
"""What it loads of an implementation; of these it looks whether there is one for pages."""

_names: set[str] = set()


def accept_in_batches(name: str) -> None:
    """Let `generate_batch` take an implementation of this name, with pages, as it takes FlashAttention's.

    Older versions call attention another way: there `generate_batch` refuses the name.
    """
    from transformers import __version__

    if tuple(map(int, __version__.split(".")[:2])) < FIRST:
        return
    _names.add(name)
    parts = [import_module(f"{PACKAGE}.{part}") for part in ("initialization", "continuous_api", "cache")]
    for part in parts:
        _replace(part, ASK, FlashPredicate)
    _replace(parts[0], LOAD, FunctionLoader)


def _replace(module: ModuleType, name: str, answer: "type[FlashPredicate | FunctionLoader]") -> None:
    """Replace a function that a module imported by an answer for our names, once."""
    theirs = getattr(module, name, None)
    if theirs is not None and not isinstance(theirs, answer):
        setattr(module, name, answer(theirs))


class FlashPredicate:
    """Answers whether an implementation is one of flash attention, and one of certain versions."""

    def __init__(self, theirs: Callable[..., bool]) -> None:
        self._theirs = theirs

    def __call__(
        self, config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
    ) -> bool:
        """Return True for our names, and what transformers says for others."""
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name in _names or self._theirs(config, requested_attention_implementation, version)


class FunctionLoader:
    """Answers with the functions of an implementation."""

    def __init__(self, theirs: Callable[..., Any]) -> None:
        self._theirs = theirs

    def __call__(self, implementation: str | None, *others: Any, **options: Any) -> Any:
        """Return ours for our names, and what transformers loads for others."""
        if implementation in _names:
            return FUNCTIONS, ()
        return self._theirs(implementation, *others, **options)

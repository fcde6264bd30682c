"""The entry point of the group `torch.backends`, which PyTorch calls at the end of `import torch`.

It registers the name `blocktune` of `torch.nn.attention.activate_flash_attention_impl`, and acts by the environment
alone. With BLOCKTUNE_AUTOTUNE=1 every `@triton.autotune` of the process is tuned by blocktune, as after
`blocktune.install()`; with BLOCKTUNE_SDPA=1 PyTorch's attention calls our kernels; with BLOCKTUNE_RECORD it writes down
its shapes. No program has to be changed for it.
"""

import logging
from collections.abc import Callable
from typing import Any

from blocktune.kernels.files.variables import AUTOTUNE, RECORD, SDPA
from blocktune.runtime.provider import PROVIDER

logger = logging.getLogger("blocktune")


def install_by_environment() -> None:
    """Register the provider of attention, and do what the environment asks for.

    Every process inherits the variables, and most launch no kernel: what goes wrong is a warning, and torch is
    imported.
    """
    _attempt("PyTorch does not know blocktune's attention", _register)
    if AUTOTUNE.is_on():
        _attempt(f"Autotuned kernels are not tuned by blocktune, although {AUTOTUNE.name}=1", _install)
    if SDPA.is_on():
        _attempt(f"PyTorch's attention does not call blocktune's kernels, although {SDPA.name}=1", _activate)
    elif RECORD.text():
        _attempt(f"Shapes of PyTorch's attention are not recorded, although {RECORD.name} is set", _observe)


def _attempt(consequence: str, act: Callable[[], None]) -> None:
    try:
        act()
    except Exception as error:
        logger.warning("%s: %s: %s", consequence, type(error).__name__, error)


def _register() -> None:
    from torch.nn.attention import register_flash_attention_impl

    register_flash_attention_impl(PROVIDER, register_fn=_replace_ops)


def _replace_ops() -> Any:
    """Replace PyTorch's ops when the provider is activated: most processes do not load what does it."""
    from blocktune.runtime.provider.registration import replace_ops

    return replace_ops()


def _activate() -> None:
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl(PROVIDER)


def _observe() -> None:
    """Replace PyTorch's ops by what records their shapes, until the process ends."""
    from blocktune.runtime.provider.registration import replace_ops
    from blocktune.runtime.provider.replacement import LateObserver

    _observed.append(replace_ops(late=LateObserver()))


_observed: list[Any] = []
"""What keeps the observer in place."""


def _install() -> None:
    from blocktune.runtime.autotuned.settings import Settings
    from blocktune.tuner.drop_in.install import install_without_compiler

    install_without_compiler(only=(), without=(), settings=Settings(), frozen=None)

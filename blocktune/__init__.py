"""Fastest block sizes for Triton attention, found, explained, kept and dispatched.

    from blocktune import attention

    out = attention(query, key, value, is_causal=True)  # torch.nn.functional.scaled_dot_product_attention, tuned

Importing this package loads neither torch nor triton; the first use of a name below loads what it needs.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blocktune.kernels.config import KernelConfig
    from blocktune.kernels.dispatch import Dispatcher, attention, best_config
    from blocktune.kernels.shape import AttentionShape

    __version__: str

__all__ = ["AttentionShape", "Dispatcher", "KernelConfig", "__version__", "attention", "best_config"]

_HOMES = {
    "AttentionShape": "blocktune.kernels.shape",
    "Dispatcher": "blocktune.kernels.dispatch",
    "KernelConfig": "blocktune.kernels.config",
    "attention": "blocktune.kernels.dispatch",
    "best_config": "blocktune.kernels.dispatch",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used, and keeps it."""
    if name == "__version__":
        value: Any = metadata.version("blocktune")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'blocktune' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

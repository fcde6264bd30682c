"""Fastest block sizes for Triton attention, found, explained, kept and dispatched.

    from blocktune import attention

    out = attention(query, key, value, is_causal=True)  # torch.nn.functional.scaled_dot_product_attention, tuned

Importing this package loads neither torch nor triton; the first use of a name below loads what it needs.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blocktune.kernels.block_mask import BlockMask
    from blocktune.kernels.cache_api import flash_attn_with_kvcache, tree_attention
    from blocktune.kernels.config import KernelConfig
    from blocktune.kernels.dispatch import Dispatcher, attention, best_config
    from blocktune.kernels.flash_api import flash_attn_func, flash_attn_varlen_func
    from blocktune.kernels.fp8_api import attention_fp8
    from blocktune.kernels.shape import AttentionShape
    from blocktune.kernels.sparse_api import block_sparse_attention
    from blocktune.kernels.sync import sync_configs
    from blocktune.kernels.tree_mask import tree_words
    from blocktune.kernels.user_kernel import tuned

    __version__: str

__all__ = [
    "AttentionShape",
    "BlockMask",
    "Dispatcher",
    "KernelConfig",
    "__version__",
    "attention",
    "attention_fp8",
    "best_config",
    "block_sparse_attention",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "sync_configs",
    "tree_attention",
    "tree_words",
    "tuned",
]

_HOMES = {
    "AttentionShape": "blocktune.kernels.shape",
    "BlockMask": "blocktune.kernels.block_mask",
    "Dispatcher": "blocktune.kernels.dispatch",
    "KernelConfig": "blocktune.kernels.config",
    "attention": "blocktune.kernels.dispatch",
    "attention_fp8": "blocktune.kernels.fp8_api",
    "best_config": "blocktune.kernels.dispatch",
    "block_sparse_attention": "blocktune.kernels.sparse_api",
    "flash_attn_func": "blocktune.kernels.flash_api",
    "flash_attn_varlen_func": "blocktune.kernels.flash_api",
    "flash_attn_with_kvcache": "blocktune.kernels.cache_api",
    "sync_configs": "blocktune.kernels.sync",
    "tree_attention": "blocktune.kernels.cache_api",
    "tree_words": "blocktune.kernels.tree_mask",
    "tuned": "blocktune.kernels.user_kernel",
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

"""Fastest block sizes for Triton attention, found, explained, kept and dispatched.

    from blocktune import attention

    out = attention(query, key, value, is_causal=True)  # torch.nn.functional.scaled_dot_product_attention, tuned

Importing this package loads neither torch nor triton; the first use of a name below loads what it needs.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blocktune.kernels.api.block_sparse import block_sparse_attention
    from blocktune.kernels.api.flash_attn import flash_attn_func, flash_attn_varlen_func
    from blocktune.kernels.api.fp8 import attention_fp8
    from blocktune.kernels.api.kv_cache import flash_attn_with_kvcache, tree_attention
    from blocktune.kernels.api.rank_sync import sync_configs
    from blocktune.kernels.dispatch.dispatcher import Dispatcher, attention, best_config
    from blocktune.kernels.tuned.function import tuned
    from blocktune.kernels.values.block_mask import BlockMask
    from blocktune.kernels.values.config import KernelConfig
    from blocktune.kernels.values.shape import AttentionShape
    from blocktune.kernels.values.tree_mask import tree_words

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
    "AttentionShape": "blocktune.kernels.values.shape",
    "BlockMask": "blocktune.kernels.values.block_mask",
    "Dispatcher": "blocktune.kernels.dispatch.dispatcher",
    "KernelConfig": "blocktune.kernels.values.config",
    "attention": "blocktune.kernels.dispatch.dispatcher",
    "attention_fp8": "blocktune.kernels.api.fp8",
    "best_config": "blocktune.kernels.dispatch.dispatcher",
    "block_sparse_attention": "blocktune.kernels.api.block_sparse",
    "flash_attn_func": "blocktune.kernels.api.flash_attn",
    "flash_attn_varlen_func": "blocktune.kernels.api.flash_attn",
    "flash_attn_with_kvcache": "blocktune.kernels.api.kv_cache",
    "sync_configs": "blocktune.kernels.api.rank_sync",
    "tree_attention": "blocktune.kernels.api.kv_cache",
    "tree_words": "blocktune.kernels.values.tree_mask",
    "tuned": "blocktune.kernels.tuned.function",
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

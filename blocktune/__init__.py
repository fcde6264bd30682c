"""Fastest block sizes for Triton attention, found, explained, kept and dispatched.

    from blocktune import attention

    out = attention(query, key, value, is_causal=True)  # torch.nn.functional.scaled_dot_product_attention, tuned

Importing this package loads neither torch nor triton; the first use of a name below loads what it needs.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from blocktune.kernels.values.bindings import bind

if TYPE_CHECKING:
    from blocktune.kernels.api.block_sparse import block_sparse_attention
    from blocktune.kernels.api.flash_attn import flash_attn_func, flash_attn_varlen_func
    from blocktune.kernels.api.flash_packed import (
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
    from blocktune.kernels.api.fp8 import attention_fp8
    from blocktune.kernels.api.kv_cache import flash_attn_with_kvcache, tree_attention
    from blocktune.kernels.api.partial_results import merge_partial
    from blocktune.kernels.api.rank_sync import sync_configs
    from blocktune.kernels.api.torch_varlen import varlen_attn
    from blocktune.kernels.dispatch.dispatcher import Dispatcher, attention, best_config
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.kernels.parallel.attention import context_parallel_attention
    from blocktune.kernels.parallel.decode import context_parallel_decode
    from blocktune.kernels.parallel.plan.layout import SequenceLayout
    from blocktune.kernels.parallel.sequence import join_sequence, split_sequence
    from blocktune.kernels.selection.explanation import Explanation
    from blocktune.kernels.stored.sources import JsonConfigs, SqliteConfigs
    from blocktune.kernels.tuned.settings import Settings
    from blocktune.kernels.values.block_mask import BlockMask
    from blocktune.kernels.values.config import KernelConfig
    from blocktune.kernels.values.errors import (
        BlocktuneError,
        NoDeviceError,
        NoFeasibleConfigError,
        RankError,
        StoreError,
        UsageError,
    )
    from blocktune.kernels.values.features import Features
    from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
    from blocktune.kernels.values.tree_mask import tree_words
    from blocktune.tuner.cost.explain import explain
    from blocktune.tuner.occupancy.of_block import occupancy
    from blocktune.tuner.report.frames import load_sweep, load_trials
    from blocktune.tuner.sampling.guided_sampler import GuidedSampler
    from blocktune.tuner.search.report import Budget
    from blocktune.tuner.search.tune import tune
    from blocktune.tuner.tuned.autotune import autotune, space
    from blocktune.tuner.tuned.install import install, uninstall
    from blocktune.tuner.tuned.tune_schedule import tune_schedule

    __version__: str

__all__ = [
    "AttentionShape",
    "BlockMask",
    "BlocktuneError",
    "Budget",
    "Causal",
    "DeviceSpec",
    "Direction",
    "Dispatcher",
    "Explanation",
    "Features",
    "GuidedSampler",
    "JsonConfigs",
    "KernelConfig",
    "NoDeviceError",
    "NoFeasibleConfigError",
    "RankError",
    "SequenceLayout",
    "Settings",
    "SqliteConfigs",
    "StoreError",
    "UsageError",
    "__version__",
    "attention",
    "attention_fp8",
    "autotune",
    "best_config",
    "block_sparse_attention",
    "context_parallel_attention",
    "context_parallel_decode",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "join_sequence",
    "load_sweep",
    "load_trials",
    "merge_partial",
    "occupancy",
    "space",
    "split_sequence",
    "sync_configs",
    "tree_attention",
    "tree_words",
    "tune",
    "tune_schedule",
    "uninstall",
    "varlen_attn",
]

_HOMES = {
    "AttentionShape": "blocktune.kernels.values.shape",
    "BlockMask": "blocktune.kernels.values.block_mask",
    "BlocktuneError": "blocktune.kernels.values.errors",
    "Budget": "blocktune.tuner.search.report",
    "Causal": "blocktune.kernels.values.shape",
    "DeviceSpec": "blocktune.kernels.hardware.device",
    "Direction": "blocktune.kernels.values.shape",
    "Dispatcher": "blocktune.kernels.dispatch.dispatcher",
    "Explanation": "blocktune.kernels.selection.explanation",
    "Features": "blocktune.kernels.values.features",
    "GuidedSampler": "blocktune.tuner.sampling.guided_sampler",
    "JsonConfigs": "blocktune.kernels.stored.sources",
    "KernelConfig": "blocktune.kernels.values.config",
    "NoDeviceError": "blocktune.kernels.values.errors",
    "NoFeasibleConfigError": "blocktune.kernels.values.errors",
    "RankError": "blocktune.kernels.values.errors",
    "SequenceLayout": "blocktune.kernels.parallel.plan.layout",
    "Settings": "blocktune.kernels.tuned.settings",
    "SqliteConfigs": "blocktune.kernels.stored.sources",
    "StoreError": "blocktune.kernels.values.errors",
    "UsageError": "blocktune.kernels.values.errors",
    "attention": "blocktune.kernels.dispatch.dispatcher",
    "attention_fp8": "blocktune.kernels.api.fp8",
    "autotune": "blocktune.tuner.tuned.autotune",
    "best_config": "blocktune.kernels.dispatch.dispatcher",
    "block_sparse_attention": "blocktune.kernels.api.block_sparse",
    "context_parallel_attention": "blocktune.kernels.parallel.attention",
    "context_parallel_decode": "blocktune.kernels.parallel.decode",
    "explain": "blocktune.tuner.cost.explain",
    "flash_attn_func": "blocktune.kernels.api.flash_attn",
    "flash_attn_kvpacked_func": "blocktune.kernels.api.flash_packed",
    "flash_attn_qkvpacked_func": "blocktune.kernels.api.flash_packed",
    "flash_attn_varlen_func": "blocktune.kernels.api.flash_attn",
    "flash_attn_varlen_kvpacked_func": "blocktune.kernels.api.flash_packed",
    "flash_attn_varlen_qkvpacked_func": "blocktune.kernels.api.flash_packed",
    "flash_attn_with_kvcache": "blocktune.kernels.api.kv_cache",
    "install": "blocktune.tuner.tuned.install",
    "join_sequence": "blocktune.kernels.parallel.sequence",
    "load_sweep": "blocktune.tuner.report.frames",
    "load_trials": "blocktune.tuner.report.frames",
    "merge_partial": "blocktune.kernels.api.partial_results",
    "occupancy": "blocktune.tuner.occupancy.of_block",
    "space": "blocktune.tuner.tuned.autotune",
    "split_sequence": "blocktune.kernels.parallel.sequence",
    "sync_configs": "blocktune.kernels.api.rank_sync",
    "tree_attention": "blocktune.kernels.api.kv_cache",
    "tree_words": "blocktune.kernels.values.tree_mask",
    "tune": "blocktune.tuner.search.tune",
    "tune_schedule": "blocktune.tuner.tuned.tune_schedule",
    "uninstall": "blocktune.tuner.tuned.install",
    "varlen_attn": "blocktune.kernels.api.torch_varlen",
}

# not public: what a room takes from one above it
bind(
    {
        "pictures_of": "blocktune.cli.report.notebook",
        "text_of_analysis": "blocktune.tuner.cost.text",
        "text_of_occupancy": "blocktune.tuner.occupancy.text",
        "usefulness": "blocktune.tuner.cost.ranking",
    }
)


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, and keep it."""
    if name == "__version__":
        value: Any = metadata.version("blocktune")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'blocktune' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)

"""The names that users import."""

import importlib.metadata

import pytest

import blocktune
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


def test_all_public_names_exist_and_are_those_of_the_rooms() -> None:
    public = {name: getattr(blocktune, name) for name in blocktune.__all__}
    assert public == {
        "AttentionShape": AttentionShape,
        "BlockMask": BlockMask,
        "Dispatcher": Dispatcher,
        "KernelConfig": KernelConfig,
        "__version__": importlib.metadata.version("blocktune"),
        "attention": attention,
        "attention_fp8": attention_fp8,
        "best_config": best_config,
        "block_sparse_attention": block_sparse_attention,
        "flash_attn_func": flash_attn_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_with_kvcache": flash_attn_with_kvcache,
        "sync_configs": sync_configs,
        "tree_attention": tree_attention,
        "tree_words": tree_words,
        "tuned": tuned,
    }


def test_dir_lists_them() -> None:
    assert set(blocktune.__all__) <= set(dir(blocktune))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        _ = blocktune.atention  # type: ignore[attr-defined]

"""The names that users import."""

import importlib.metadata

import pytest

import blocktune
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

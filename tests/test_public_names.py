"""The names that users import."""

import ast
import importlib.metadata
from pathlib import Path

import pytest

import blocktune
from blocktune import offline
from blocktune.kernels.hardware.device import DeviceSpec
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
from blocktune.runtime.api.block_sparse import block_sparse_attention
from blocktune.runtime.api.flash_attn import flash_attn_func, flash_attn_varlen_func
from blocktune.runtime.api.flash_packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from blocktune.runtime.api.fp8 import attention_fp8
from blocktune.runtime.api.kv_cache import flash_attn_with_kvcache, tree_attention
from blocktune.runtime.api.partial_results import merge_partial
from blocktune.runtime.api.rank_sync import sync_configs
from blocktune.runtime.api.torch_varlen import varlen_attn
from blocktune.runtime.api.warm_up import tune_at_warmup
from blocktune.runtime.autotuned.settings import Settings
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention, best_config
from blocktune.runtime.parallel.attention import context_parallel_attention
from blocktune.runtime.parallel.decode import context_parallel_decode
from blocktune.runtime.parallel.plan.layout import SequenceLayout
from blocktune.runtime.parallel.sequence import join_sequence, split_sequence
from blocktune.runtime.selection.explanation import Explanation
from blocktune.runtime.store_reader.sources import JsonConfigs, SqliteConfigs
from blocktune.tuner.cost.explain import explain
from blocktune.tuner.drop_in.autotune import autotune, space
from blocktune.tuner.drop_in.install import install, uninstall
from blocktune.tuner.drop_in.tune_schedule import tune_schedule
from blocktune.tuner.occupancy.of_block import occupancy
from blocktune.tuner.offline.compile import compile_offline
from blocktune.tuner.report.frames import load_sweep, load_trials
from blocktune.tuner.sampling.guided_sampler import GuidedSampler
from blocktune.tuner.search.report import Budget
from blocktune.tuner.search.tune import tune


def test_all_public_names_exist_and_are_those_of_the_rooms() -> None:
    public = {name: getattr(blocktune, name) for name in blocktune.__all__}
    assert public == {
        "AttentionShape": AttentionShape,
        "BlockMask": BlockMask,
        "BlocktuneError": BlocktuneError,
        "Budget": Budget,
        "Causal": Causal,
        "DeviceSpec": DeviceSpec,
        "Direction": Direction,
        "Dispatcher": Dispatcher,
        "Explanation": Explanation,
        "Features": Features,
        "GuidedSampler": GuidedSampler,
        "JsonConfigs": JsonConfigs,
        "KernelConfig": KernelConfig,
        "NoDeviceError": NoDeviceError,
        "NoFeasibleConfigError": NoFeasibleConfigError,
        "RankError": RankError,
        "SequenceLayout": SequenceLayout,
        "Settings": Settings,
        "SqliteConfigs": SqliteConfigs,
        "StoreError": StoreError,
        "UsageError": UsageError,
        "attention": attention,
        "attention_fp8": attention_fp8,
        "autotune": autotune,
        "best_config": best_config,
        "block_sparse_attention": block_sparse_attention,
        "compile_offline": compile_offline,
        "context_parallel_attention": context_parallel_attention,
        "context_parallel_decode": context_parallel_decode,
        "explain": explain,
        "flash_attn_func": flash_attn_func,
        "flash_attn_kvpacked_func": flash_attn_kvpacked_func,
        "flash_attn_qkvpacked_func": flash_attn_qkvpacked_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_varlen_kvpacked_func": flash_attn_varlen_kvpacked_func,
        "flash_attn_varlen_qkvpacked_func": flash_attn_varlen_qkvpacked_func,
        "flash_attn_with_kvcache": flash_attn_with_kvcache,
        "install": install,
        "join_sequence": join_sequence,
        "load_sweep": load_sweep,
        "load_trials": load_trials,
        "merge_partial": merge_partial,
        "occupancy": occupancy,
        "offline": offline,
        "space": space,
        "split_sequence": split_sequence,
        "sync_configs": sync_configs,
        "tree_attention": tree_attention,
        "tree_words": tree_words,
        "tune": tune,
        "tune_at_warmup": tune_at_warmup,
        "tune_schedule": tune_schedule,
        "uninstall": uninstall,
        "varlen_attn": varlen_attn,
        "__version__": importlib.metadata.version("blocktune"),
    }


def test_the_stub_is_the_one_list_of_public_names() -> None:
    """A line of another form would be known to type checkers and not at run time."""
    stub = ast.parse(Path(blocktune.__file__).with_suffix(".pyi").read_text())
    _docstring, *lines = map(ast.unparse, stub.body)
    assert lines.pop() == "__version__: str"
    assert lines == [f"from {module} import {name} as {name}" for name, module in blocktune._HOMES.items()]


def test_errors_can_be_caught_by_their_public_names() -> None:
    for error in (UsageError, NoDeviceError, NoFeasibleConfigError, RankError, StoreError):
        assert issubclass(error, blocktune.BlocktuneError)
    with pytest.raises(blocktune.BlocktuneError):
        blocktune.best_config(blocktune.AttentionShape(batch=1, num_heads=1, seqlen_q=64, head_dim=64), device="h2000")


def test_dir_lists_them_and_nothing_else() -> None:
    assert dir(blocktune) == sorted(blocktune.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        _ = blocktune.atention  # type: ignore[attr-defined]

"""Up to 256 packed queries, where the forward kernels' tiles leave most of a GPU idle: when, by which default, and the
results against a float64 reference; in Triton's interpreter on the CPU, compiled where a GPU is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.limits import known_ccs, limits_for
from blocktune.kernels.portable.decode.defaults import PAIRED_KEYS
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.runtime.selection.fallback import ConfigTable, climb_down
from blocktune.runtime.selection.ladder import Candidate
from tests.kernels.portable.decode.test_flash_decode import (
    DEVICE,
    HOPPER,
    KERNEL,
    case_of,
    check,
    config_of,
    paged,
    runs,
)
from tests.kernels.portable.decode.test_flash_decode import shape_of as small_shape
from tests.support.compiles.measures import compile_resources
from tests.support.triton_modes import compiled_here

# Triton's interpreter turns one-element arrays into numbers, which NumPy deprecates.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

CACHED = Features(cached=True)
WINDOW = Features(window=(2047, -1))


def shape_of(features: Features | None = None, **changes: Any) -> AttentionShape:
    """32 heads over 8 of bfloat16, 64 queries and 8192 keys of dimension 128."""
    sizes = {"batch": 1, "num_heads": 32, "num_heads_kv": 8, "seqlen_q": 64, "seqlen_k": 8192, "head_dim": 128}
    return small_shape(features, **(sizes | {"dtype": "bfloat16"} | changes))


def few_heads(features: Features | None = None, **changes: Any) -> AttentionShape:
    """Two heads over one of float16 and dimension 16."""
    return small_shape(features, **({"batch": 1, "num_heads": 2, "num_heads_kv": 1} | changes))


# ---- when


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": 2},
        {"seqlen_q": 128},
        {"seqlen_q": 256, "num_heads": 16},
        {"seqlen_k": 2048},
        {"num_heads_kv": 32},
        {"num_heads": 66, "num_heads_kv": 6, "dtype": "float16"},
        {"causal": Causal.LOWER_RIGHT},
        {"features": WINDOW},
        {"features": CACHED},
        {"features": Features(cached=True, page_size=64), "seqlen_q": 100},
    ],
    ids=str,
)
def test_many_queries_where_the_forward_kernels_leave_most_of_the_gpu_idle(changes: dict[str, Any]) -> None:
    """The dispatcher's choice where nothing was tuned. On Hopper a forward cuts the keys, unless there is a window."""
    shape = shape_of(**changes)
    for limits in (limits_for((8, 0)), HOPPER):
        assert KERNEL.unsupported(shape, limits) is None
        first = next(step for step in climb_down(ConfigTable([]), shape, limits) if isinstance(step, Candidate))
        split = limits is HOPPER and shape.features != WINDOW
        kernel = get_kernel("flash_fwd_hopper_split") if split else KERNEL
        assert first.config == kernel.default_config(shape, limits)


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"batch": 8}, "seqlen_q=64, 256 tiles, 8192 keys and bfloat16"),
        ({"batch": 2, "seqlen_q": 65}, "seqlen_q=65, 128 tiles, 8192 keys"),
        ({"num_heads": 67, "num_heads_kv": 1}, "67 tiles"),
        ({"seqlen_q": 257, "num_heads": 8}, "seqlen_q=257, 40 tiles"),
        ({"seqlen_k": 2047}, "2047 keys"),
        ({"causal": Causal.UPPER_LEFT}, "64 keys"),
        ({"features": Features(window=(1023, -1))}, "1087 keys"),
        ({"features": CACHED, "dtype": "float32"}, "32 tiles, 8192 keys and float32"),
        ({"dtype": "float32"}, "float32"),
    ],
    ids=str,
)
def test_elsewhere_the_limit_is_told_with_what_would_lift_it(changes: dict[str, Any], got: str) -> None:
    reason = KERNEL.unsupported(shape_of(**changes), HOPPER) or ""
    for rule in (
        "`seqlen_q <= 32`",
        "`seqlen_q <= 256`",
        "seqlen_q / 64) <= 66`",
        "`keys in sight >= 2048`",
        "16 bits",
    ):
        assert rule in reason
    assert got in reason.partition("but got ")[2]
    assert reason.endswith("Leave it to the forward kernels, or pass fewer queries at a time.")


@pytest.mark.parametrize("page_size", [0, 64])
def test_a_cache_is_read_for_any_number_of_queries_since_no_forward_kernel_knows_it(page_size: int) -> None:
    shape = shape_of(Features(cached=True, page_size=page_size), batch=8, seqlen_q=3000, causal=Causal.LOWER_RIGHT)
    assert KERNEL.unsupported(shape, HOPPER) is None
    assert KERNEL.default_config(shape, HOPPER).parameters["splits"] == 1


@pytest.mark.parametrize("changes", [{"batch": 64}, {"seqlen_k": 16}, {"dtype": "float32"}], ids=str)
def test_few_queries_are_packed_always(changes: dict[str, Any]) -> None:
    assert KERNEL.unsupported(shape_of(seqlen_q=32, **changes), HOPPER) is None


def test_a_tree_has_two_words_a_query_however_idle_the_gpu() -> None:
    tree = Features(cached=True, mask=MaskKind.TREE)
    assert KERNEL.unsupported(shape_of(tree, batch=64), HOPPER) is None
    assert "`seqlen_q <= 64` must hold for a tree" in (KERNEL.unsupported(shape_of(tree, seqlen_q=65), HOPPER) or "")


# ---- defaults


@pytest.mark.parametrize(
    ("batch", "queries", "splits"),
    [(1, 16, 16), (8, 16, 2), (1, 32, 8), (1, 64, 4)],
)
def test_whole_tiles_have_a_multiprocessor_each(batch: int, queries: int, splits: int) -> None:
    """The splits of the first three are those of the fastest configs measured on an H200."""
    shape = shape_of(batch=batch, seqlen_q=queries)
    config = KERNEL.default_config(shape, HOPPER)
    assert (config.block_m, config.block_n, config.num_warps, config.num_stages) == (64, 64, 4, 4)
    assert config.parameters["splits"] == splits
    row_tiles = 4 * queries // config.block_m
    assert 99 <= batch * 8 * row_tiles * splits <= 132


@pytest.mark.parametrize(("batch", "queries"), [(2, 64), (1, 128)])
def test_tiles_that_read_many_of_the_same_keys_share_a_multiprocessor(batch: int, queries: int) -> None:
    shape = shape_of(batch=batch, seqlen_q=queries, seqlen_k=16384)
    config = KERNEL.default_config(shape, HOPPER)
    assert (config.block_m, config.block_n, config.num_warps, config.num_stages) == (64, 64, 4, 3)
    programs = batch * 8 * (4 * queries // config.block_m) * config.parameters["splits"]
    assert 2 * 99 <= programs <= 2 * 132
    assert shape.seqlen_k >= PAIRED_KEYS * config.parameters["splits"]


def test_tiles_that_read_few_of_the_same_keys_have_a_multiprocessor_each() -> None:
    shape = shape_of(batch=2, seqlen_q=64)
    config = KERNEL.default_config(shape, HOPPER)
    assert (config.num_stages, config.parameters["splits"]) == (4, 2)
    assert shape.seqlen_k // 4 < PAIRED_KEYS


def test_more_whole_tiles_than_multiprocessors_share_them() -> None:
    shape = shape_of(batch=32, seqlen_q=16, seqlen_k=1024)
    config = KERNEL.default_config(shape, HOPPER)
    assert (config.num_stages, config.parameters["splits"]) == (3, 1)
    assert 2 * KERNEL.shared_bytes(config, shape, HOPPER) <= HOPPER.shared_per_block_optin_bytes


@pytest.mark.parametrize("cc", known_ccs(), ids=str)
@pytest.mark.parametrize(("queries", "dtype"), [(32, "bfloat16"), (32, "float32"), (64, "float16"), (256, "bfloat16")])
@pytest.mark.parametrize("head_dim", [16, 128, 192, 256])
def test_defaults_break_no_rule(cc: tuple[int, int], queries: int, dtype: str, head_dim: int) -> None:
    shape = shape_of(num_heads=16, num_heads_kv=4, seqlen_q=queries, head_dim=head_dim, dtype=dtype)
    config = KERNEL.default_config(shape, limits_for(cc))
    assert KERNEL.violations(config, shape, limits_for(cc)) == ()
    # below 8.0 operands are float32, and 64 rows of wide heads may need more shared memory than a block has
    assert config.block_m == 64 or KERNEL.violations(replace(config, block_m=2 * config.block_m), shape, limits_for(cc))


@pytest.mark.few(1)
@compiled_here
@pytest.mark.parametrize(("head_dim", "warps", "most_spilled"), [(128, 4, 0), (256, 8, 20)])
def test_hopper_s_defaults_hardly_spill(
    head_dim: int, warps: int, most_spilled: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton 3.6 spills nothing; 4 warps would spill 100 B and more of head dimension 256 with either version."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = shape_of(head_dim=head_dim, causal=Causal.LOWER_RIGHT)
    config = KERNEL.default_config(shape, HOPPER)
    resources = compile_resources(KERNEL, config, shape, (9, 0))
    assert (config.num_warps, resources.tensor_cores) == (warps, "wgmma")
    assert resources.spill_bytes <= most_spilled
    assert resources.shared_bytes == KERNEL.shared_bytes(config, shape, HOPPER)


# ---- results: few heads, for the interpreter takes long to merge a row


@runs
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("queries", "heads", "causal", "splits"),
    [
        (40, (4, 2), Causal.LOWER_RIGHT, 8),
        (64, (3, 1), Causal.NONE, 4),
        (100, (2, 1), Causal.LOWER_RIGHT, 4),
        (128, (1, 1), Causal.LOWER_RIGHT, 2),
        (128, (4, 2), Causal.NONE, 1),
        (256, (2, 1), Causal.LOWER_RIGHT, 1),
    ],
)
def test_many_queries(queries: int, heads: tuple[int, int], causal: Causal, splits: int) -> None:
    """Groups whose rows end inside a tile, and keys that end inside one."""
    sizes = {"batch": 1, "num_heads": heads[0], "num_heads_kv": heads[1], "seqlen_q": queries, "seqlen_k": 2100}
    check(config_of(64, 128, splits), case_of(small_shape(causal=causal, **sizes)))


@runs
@pytest.mark.parametrize("block_m", [16, 32])
def test_lower_tiles_than_the_default_s(block_m: int) -> None:
    shape = few_heads(seqlen_q=33, seqlen_k=2048, causal=Causal.LOWER_RIGHT)
    check(config_of(block_m, 256, splits=2), case_of(shape))


@runs
@pytest.mark.parametrize(("causal", "splits"), [(Causal.NONE, 1), (Causal.LOWER_RIGHT, 1), (Causal.LOWER_RIGHT, 8)])
def test_filled_caches(causal: Causal, splits: int) -> None:
    """An empty entry, one with fewer keys than queries, one with as many, and a full one; NaN behind all of them."""
    shape = few_heads(CACHED, batch=4, seqlen_q=35, seqlen_k=2100, causal=causal)
    check(config_of(64, 256, splits), case_of(shape, (0, 25, 35, 2099)))


@runs
def test_a_chunk_of_a_prompt_over_a_cache() -> None:
    shape = few_heads(CACHED, batch=2, num_heads=1, seqlen_q=300, seqlen_k=700, causal=Causal.LOWER_RIGHT)
    check(config_of(64, 128, splits=1), case_of(shape, (700, 310)))


@runs
@pytest.mark.parametrize(("page_size", "splits"), [(16, 4), (256, 1)])
def test_pages(page_size: int, splits: int) -> None:
    features = Features(cached=True, page_size=page_size)
    shape = few_heads(features, batch=2, seqlen_q=64, seqlen_k=2304, causal=Causal.LOWER_RIGHT)
    case = case_of(shape, (2150, 50))
    check(config_of(64, 128, splits), paged(case, 400), case)


@runs
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("window", "causal", "splits"),
    [
        ((2000, -1), Causal.LOWER_RIGHT, 4),
        ((2000, -1), Causal.NONE, 1),
        ((-1, 3), Causal.NONE, 4),
        ((1990, 40), Causal.NONE, 1),
    ],
)
def test_windows(window: tuple[int, int], causal: Causal, splits: int) -> None:
    shape = few_heads(Features(window=window, cached=True), batch=2, seqlen_q=60, seqlen_k=2500, causal=causal)
    check(config_of(64, 256, splits), case_of(shape, (2500, 2101)))


@runs
def test_soft_cap_and_alibi() -> None:
    slopes = torch.tensor([[0.01, 0.02]], device=DEVICE)
    shape = few_heads(Features(softcap=True, alibi=True), seqlen_q=48, seqlen_k=2048, causal=Causal.LOWER_RIGHT)
    check(config_of(64, 256, splits=2), case_of(shape, softcap=1.5, alibi_slopes=slopes))


@pytest.mark.gpu
@runs
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (28, 4), (16, 1)])
@pytest.mark.parametrize(("queries", "batch"), [(48, 1), (64, 2), (100, 1), (128, 1)])
def test_real_sizes(dtype: str, heads: tuple[int, int], queries: int, batch: int) -> None:
    sizes = {"num_heads": heads[0], "num_heads_kv": heads[1], "batch": batch, "seqlen_q": queries, "seqlen_k": 5000}
    for causal in (Causal.NONE, Causal.LOWER_RIGHT):
        shape = shape_of(dtype=dtype, causal=causal, **sizes)
        case = case_of(shape)
        default = KERNEL.default_config(shape, HOPPER)
        for config in (default, config_of(64, 64, 8, 4, 3), config_of(32, 128, 4, 8, 2)):
            check(config, case)


@pytest.mark.gpu
@runs
@pytest.mark.parametrize("head_dim", [64, 96, 192, 256])
@pytest.mark.parametrize("page_size", [0, 16, 256])
def test_real_caches(head_dim: int, page_size: int) -> None:
    features = Features(cached=True, page_size=page_size)
    shape = shape_of(features, batch=2, seqlen_k=4096, head_dim=head_dim, causal=Causal.LOWER_RIGHT)
    case = case_of(shape, (4000, 50))
    check(KERNEL.default_config(shape, HOPPER), paged(case, 600) if page_size else case, case)


@pytest.mark.gpu
@runs
@pytest.mark.parametrize("page_size", [0, 64])
def test_a_real_chunk_of_a_prompt(page_size: int) -> None:
    features = Features(cached=True, page_size=page_size)
    shape = shape_of(features, batch=3, seqlen_q=1000, seqlen_k=4000, causal=Causal.LOWER_RIGHT)
    case = case_of(shape, (4000, 1000, 2345))
    check(KERNEL.default_config(shape, HOPPER), paged(case, 400) if page_size else case, case)

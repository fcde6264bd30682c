"""What the decoding kernel cannot compute, and its default configs."""

from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.hardware.limits import known_ccs, limits_for
from blocktune.kernels.registry import default_kernel, get_kernel
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.kernels.portable.decode.test_flash_decode import HOPPER, KERNEL, config_of, shape_of
from tests.support.compiles.measures import compile_resources
from tests.support.triton_modes import compiled_here


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seqlen_q": 33}, "`seqlen_q <= 32` must hold"),
        ({"seqlen_q": 65, "features": Features(mask=MaskKind.TREE)}, "`seqlen_q <= 64` must hold for a tree"),
        ({"features": Features(cached=True, page_size=512)}, "`page_size <= 256` must hold"),
        ({"head_dim": 8}, "`16 <= head_dim <= 256` must hold"),
        ({"features": Features(dropout=True)}, "does not know dropout"),
    ],
)
def test_what_it_cannot_compute(changes: dict[str, Any], reason: str) -> None:
    assert reason in (KERNEL.unsupported(shape_of(**changes), HOPPER) or "")


@pytest.mark.parametrize("cc", known_ccs(), ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("seqlen_k", [1, 1000, 1 << 20])
@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_default_config_breaks_no_rule(cc: tuple[int, int], dtype: str, seqlen_k: int, head_dim: int) -> None:
    shape = shape_of(seqlen_k=seqlen_k, head_dim=head_dim, dtype=dtype, num_heads=32, num_heads_kv=8)
    assert KERNEL.violations(KERNEL.default_config(shape, limits_for(cc)), shape, limits_for(cc)) == ()


@pytest.mark.parametrize("overlap", [1, 2])
def test_overlap_needs_its_hardware(overlap: int) -> None:
    config = config_of(splits=2, overlap=overlap)
    assert KERNEL.violations(config, shape_of(), HOPPER) == ()
    (text,) = KERNEL.violations(config, shape_of(), limits_for((8, 9)))
    assert f"`overlap` {overlap} of flash_decode needs programmatic dependent launch" in text


@pytest.mark.parametrize(("num_warps", "slow"), [(2, True), (4, True), (8, False)])
def test_an_output_that_fills_the_registers_is_slow_on_hopper(num_warps: int, slow: bool) -> None:
    asked = shape_of(batch=16, num_heads=192, num_heads_kv=12, seqlen_q=3, seqlen_k=1738, head_dim=160)
    config = config_of(64, 64, 2, num_warps)
    assert (KERNEL.slow_reason(config, asked, limits_for((9, 0))) is not None) is slow
    assert KERNEL.slow_reason(config, asked, limits_for((8, 0))) is None
    assert KERNEL.violations(config, asked, limits_for((9, 0))) == ()


def test_a_pair_is_two_splits() -> None:
    (text,) = KERNEL.violations(config_of(splits=4, overlap=2), shape_of(), HOPPER)
    assert "`overlap` 2 of flash_decode merges two splits, but got 4" in text


@pytest.mark.few(2)
@compiled_here
@pytest.mark.parametrize(
    ("cc", "block_m", "warps", "stages"),
    [((9, 0), 16, 4, 1), ((9, 0), 16, 2, 3), ((9, 0), 64, 4, 2), ((9, 0), 64, 8, 2), ((8, 0), 64, 4, 2)],
)
def test_shared_memory_is_what_the_compiler_allocates(
    cc: tuple[int, int], block_m: int, warps: int, stages: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = shape_of(num_heads=32, num_heads_kv=8, head_dim=128, dtype="bfloat16", seqlen_k=8192)
    config = config_of(block_m, 32, 4, warps, stages, int(cc == (9, 0)))
    resources = compile_resources(KERNEL, config, shape, cc)
    assert resources.shared_bytes == KERNEL.shared_bytes(config, shape, limits_for(cc))
    assert resources.tensor_cores == ("wgmma" if cc == (9, 0) and block_m == 64 else "mma")
    assert resources.spill_bytes == 0


def test_default_splits_fill_a_large_gpu() -> None:
    splits = {
        batch: KERNEL.default_config(
            shape_of(batch=batch, seqlen_k=8192, num_heads=32, num_heads_kv=8, head_dim=128), HOPPER
        ).parameters["splits"]
        for batch in (1, 8, 64)
    }
    assert splits == {1: 16, 8: 2, 64: 1}


@pytest.mark.parametrize(
    ("changes", "splits"),
    [
        ({}, 16),
        ({"causal": Causal.LOWER_RIGHT}, 16),
        ({"causal": Causal.UPPER_LEFT}, 1),
        ({"features": Features(window=(511, -1))}, 8),
    ],
)
def test_default_splits_only_keys_that_are_seen(changes: dict[str, Any], splits: int) -> None:
    shape = shape_of(**{"batch": 1, "seqlen_k": 8192, "num_heads": 32, "num_heads_kv": 8, "head_dim": 128} | changes)
    assert KERNEL.default_config(shape, HOPPER).parameters["splits"] == splits


@pytest.mark.parametrize(
    ("changes", "tile", "splits"),
    [
        ({}, (16, 128, 3), 16),
        ({"seqlen_q": 4}, (16, 128, 3), 16),
        ({"seqlen_q": 8}, (32, 128, 3), 16),
        ({"head_dim": 64}, (16, 128, 3), 32),  # three programs fit a multiprocessor
        ({"head_dim": 256}, (16, 64, 3), 16),  # three buffers of 128 keys do not fit
        ({"seqlen_k": 700}, (16, 64, 2), 8),  # too few tiles of 128 keys
        ({"seqlen_q": 16}, (64, 64, 4), 16),
        ({"seqlen_q": 16, "num_heads": 64, "seqlen_k": 65536}, (64, 64, 3), 16),  # two tiles of rows read the same keys
        ({"seqlen_q": 16, "num_heads": 64, "batch": 8}, (64, 64, 3), 2),
        ({"seqlen_q": 16, "batch": 64}, (64, 64, 3), 1),  # programs enough without splits
        ({"seqlen_q": 16, "num_heads": 64}, (64, 64, 4), 8),  # 512 keys for each of 16 splits
        ({"features": Features(cached=True, page_size=64)}, (16, 64, 2), 64),
        ({"dtype": "float32"}, (16, 64, 2), 64),
    ],
)
def test_the_default_over_contiguous_keys_has_deep_buffers_and_programs_that_are_resident_together(
    changes: dict[str, Any], tile: tuple[int, int, int], splits: int
) -> None:
    shape = shape_of(**{"batch": 1, "seqlen_k": 8192, "num_heads": 32, "num_heads_kv": 8, "head_dim": 128} | changes)
    default = KERNEL.default_config(shape, HOPPER)
    assert ((default.block_m, default.block_n, default.num_stages), default.parameters["splits"]) == (tile, splits)


def test_the_default_on_a_device_of_which_nothing_was_measured_has_several_programs() -> None:
    shape = shape_of(batch=1, seqlen_k=8192, num_heads=32, num_heads_kv=8, head_dim=128, dtype="bfloat16")
    default = KERNEL.default_config(shape, limits_for((8, 0)))
    assert (default.block_n, default.num_stages, default.parameters["splits"]) == (64, 2, 64)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"seqlen_q": 32}, "flash_decode"),
        ({"seqlen_q": 64, "batch": 1}, "flash_fwd_hopper_split"),  # half of a large GPU would idle
        ({"seqlen_q": 64, "batch": 1, "seqlen_k": 512}, "flash_fwd_hopper"),  # too few keys for splits
        ({"seqlen_q": 64, "batch": 8}, "flash_fwd_hopper"),
        ({"seqlen_q": 4096, "batch": 1}, "flash_fwd_hopper"),
        ({"seqlen_q": 4096, "batch": 1, "dtype": "float32"}, "flash_fwd_general"),
    ],
)
def test_many_queries_over_a_cache_are_left_to_forward_kernels(changes: dict[str, Any], first: str) -> None:
    """Decoding stays the way with a fixed number of splits, and competes in a search."""
    for page in (0, 16, 256):
        shape = cached_shape(page, **changes)
        kernel = default_kernel(shape, limits_for((9, 0)))
        assert kernel is not None
        assert kernel.name == first
    assert default_kernel(cached_shape(1, seqlen_q=4096), limits_for((9, 0))) is get_kernel("flash_fwd_general")


def cached_shape(page: int, **changes: Any) -> AttentionShape:
    sizes: dict[str, Any] = {"batch": 2, "num_heads": 32, "num_heads_kv": 8, "seqlen_k": 8192, "head_dim": 128}
    features = Features(cached=True, page_size=page)
    return AttentionShape(**sizes | {"seqlen_q": 64} | changes, causal=Causal.LOWER_RIGHT, features=features)

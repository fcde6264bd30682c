"""The general forward compiled for GPUs that are not here: tensor cores, spills, shared memory; its defaults."""

from importlib import metadata
from pathlib import Path

import pytest

from blocktune.kernels.hardware.limits import known_ccs, limits_for
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.support.compiles.measures import compile_resources
from tests.support.triton_modes import compiled_here

KERNEL = get_kernel("flash_fwd_general")
BLACKWELL = (10, 0)
TENSOR_CORES = {(8, 0): "mma", (9, 0): "wgmma", BLACKWELL: "tcgen05", (12, 0): "mma"}


def shape(features: str, head_dim: int = 128, causal: Causal = Causal.NONE, dtype: str = "bfloat16") -> AttentionShape:
    sizes = {"batch": 2, "num_heads": 8, "num_heads_kv": 8, "seqlen_q": 4096, "seqlen_k": 4096, "dtype": dtype}
    return AttentionShape(
        **sizes, head_dim=head_dim, head_dim_v=head_dim, causal=causal, features=Features.parse(features)
    )


@compiled_here
@pytest.mark.few(2)
@pytest.mark.parametrize("cc", TENSOR_CORES)
@pytest.mark.parametrize(
    ("features", "causal"),
    [
        ("window=256:0", Causal.NONE),
        ("softcap alibi dropout varlen", Causal.UPPER_LEFT),
        ("boolean", Causal.NONE),
        ("varlen cached page=16", Causal.LOWER_RIGHT),
        ("cached page=256", Causal.LOWER_RIGHT),
    ],
)
def test_default_config_compiles(
    features: str, causal: Causal, cc: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    problem, limits = shape(features, causal=causal), limits_for(cc)
    config = KERNEL.default_config(problem, limits)
    resources = compile_resources(KERNEL, config, problem, cc)
    assert resources.tensor_cores == TENSOR_CORES[cc]
    # Triton 3.9 spills up to 72 B of a thread on compute capability 8.0 and 12.0, where 3.6 spills nothing
    allowed = 0 if metadata.version("triton").startswith("3.6") else 96
    assert resources.spill_bytes <= allowed or (cc == BLACKWELL and problem.features.dropout)
    assert KERNEL.shared_bytes(config, problem, limits) <= resources.shared_bytes
    assert resources.shared_bytes <= KERNEL.most_shared_bytes(config, problem, limits)
    assert resources.shared_bytes <= limits.shared_per_block_optin_bytes


@pytest.mark.parametrize(
    ("features", "head_dim", "blocks"),
    [
        ("alibi", 64, (64, 64, 4, 3)),
        ("dropout", 64, (64, 64, 4, 3)),
        ("boolean", 128, (64, 32, 4, 3)),
        ("additive", 128, (128, 64, 8, 3)),
        ("dropout", 128, (128, 64, 8, 3)),
    ],
)
def test_hopper_s_defaults_are_those_that_were_fast_there(
    features: str, head_dim: int, blocks: tuple[int, ...]
) -> None:
    config = KERNEL.default_config(shape(features, head_dim), limits_for((9, 0)))
    assert (config.block_m, config.block_n, config.num_warps, config.num_stages) == blocks


@pytest.mark.parametrize("cc", known_ccs())
def test_default_configs_are_feasible(cc: tuple[int, int]) -> None:
    limits = limits_for(cc)
    for head_dim in (16, 64, 80, 128, 256):
        for dtype in ("bfloat16", "float32"):
            problem = shape("window=256:0 boolean", head_dim, dtype=dtype)
            if KERNEL.unsupported(problem, limits) is None:
                assert KERNEL.violations(KERNEL.default_config(problem, limits), problem, limits) == ()


@pytest.mark.parametrize("features", ["window=3:3", "softcap", "boolean", "additive", "alibi", "dropout", "varlen"])
def test_it_is_the_kernel_for_every_feature_of_dense_scores(features: str) -> None:
    assert KERNEL in kernels_for(shape(features), limits_for((9, 0)))


def test_it_does_not_compete_for_plain_shapes() -> None:
    assert KERNEL not in kernels_for(shape(""), limits_for((9, 0)))

"""The block-sparse kernels compiled for GPUs that are not here: tensor cores, no spills, tiles copied ahead."""

from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.kernels.hardware.limits import known_ccs, limits_for
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Direction
from tests.support.compiles.measures import compile_resources
from tests.support.triton_modes import compiled_here

HOPPER = (9, 0)
KERNELS = ("flash_fwd_sparse", "flash_bwd_sparse")


@pytest.fixture(autouse=True)
def _fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def shape(kernel: str, head_dim: int = 64, dtype: str = "bfloat16") -> AttentionShape:
    sizes = {"batch": 2, "num_heads": 8, "num_heads_kv": 8, "seqlen_q": 4096, "seqlen_k": 4096, "dtype": dtype}
    features, direction = Features(mask=MaskKind.BLOCK_SPARSE), get_kernel(kernel).direction
    return AttentionShape(**sizes, head_dim=head_dim, head_dim_v=head_dim, features=features, direction=direction)


@compiled_here
@pytest.mark.few(3)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("cc", "instruction"), [((8, 0), "mma"), (HOPPER, "wgmma")])
@pytest.mark.parametrize("kernel", KERNELS)
def test_default_config_compiles(kernel: str, cc: tuple[int, int], instruction: str, head_dim: int) -> None:
    """Shared memory as predicted says that all buffers are there, which loads that depend on loads would do without."""
    problem, limits = shape(kernel, head_dim), limits_for(cc)
    config = get_kernel(kernel).default_config(problem, limits)
    resources = compile_resources(get_kernel(kernel), config, problem, cc)
    assert resources.tensor_cores == instruction
    assert resources.spill_bytes == 0
    assert config.num_stages > 1
    assert resources.shared_bytes == get_kernel(kernel).shared_bytes(config, problem, limits)


@pytest.mark.parametrize("cc", known_ccs())
@pytest.mark.parametrize("kernel", KERNELS)
def test_default_configs_are_feasible_and_serve_blocks_of_64(kernel: str, cc: tuple[int, int]) -> None:
    for head_dim in (16, 64, 80, 128, 256):
        for dtype in ("bfloat16", "float32"):
            problem, limits = shape(kernel, head_dim, dtype), limits_for(cc)
            if get_kernel(kernel).unsupported(problem, limits) is not None:
                continue
            config = get_kernel(kernel).default_config(problem, limits)
            assert get_kernel(kernel).violations(config, problem, limits) == ()
            assert all(64 % value == 0 for name, value in config.parameters.items() if "block" in name)


@pytest.mark.parametrize("kernel", KERNELS)
def test_only_sparse_shapes_of_the_direction_are_served(kernel: str) -> None:
    limits = limits_for(HOPPER)
    assert kernels_for(shape(kernel), limits)[-1].name == kernel
    own = get_kernel(kernel)
    other = Direction.FORWARD if own.direction is Direction.BACKWARD else Direction.BACKWARD
    assert str(other) in str(own.unsupported(replace(shape(kernel), direction=other), limits))
    assert "needs a block mask" in str(own.unsupported(replace(shape(kernel), features=Features()), limits))
    assert "dropout" in str(own.unsupported(replace(shape(kernel), features=Features(dropout=True)), limits))
    assert "head_dim=512" in str(own.unsupported(shape(kernel, 512), limits))


def test_the_schedules_that_run_ahead_need_16_bits() -> None:
    kernel = get_kernel("flash_fwd_sparse")
    config = KernelConfig("flash_fwd_sparse", 64, 64, 4, 2, (("schedule", 2),))
    (text,) = kernel.violations(config, shape("flash_fwd_sparse", 64, "float32"), limits_for(HOPPER))
    assert "need a 16-bit data type, but got float32" in text

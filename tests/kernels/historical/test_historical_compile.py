"""The kernels of the ladder compiled for GPUs that are not here: tensor cores, spills, shared memory."""

from pathlib import Path

import pytest

from blocktune.kernels.hardware.limits import known_ccs, limits_for
from blocktune.kernels.historical.padded import next_width
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.support.compiles.measures import compile_resources
from tests.support.triton_modes import compiled_here

HISTORICAL = ["flash_v1", "flash_v2", "flash_fwd_padded", "flash_fwd_transposed"]
INSTRUCTIONS = {(7, 5): "none", (8, 0): "mma", (9, 0): "wgmma"}


def shape(head_dim: int = 64, dtype: str = "float16", causal: Causal = Causal.NONE) -> AttentionShape:
    sizes = {"batch": 2, "num_heads": 8, "num_heads_kv": 8, "seqlen_q": 4096, "seqlen_k": 4096}
    return AttentionShape(**sizes, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype, causal=causal)


@pytest.mark.few(3)
@compiled_here
@pytest.mark.parametrize("cc", INSTRUCTIONS)
@pytest.mark.parametrize("kernel", HISTORICAL)
def test_the_default_compiles_and_shared_memory_is_never_above_what_it_takes(
    kernel: str, cc: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # without tensor cores every multiplication is an instruction, and a compile takes longer with every column
    problem, limits = shape(32 if cc == (7, 5) else 64), limits_for(cc)
    config = get_kernel(kernel).default_config(problem, limits)
    resources = compile_resources(get_kernel(kernel), config, problem, cc)
    assert resources.tensor_cores == INSTRUCTIONS[cc]
    assert get_kernel(kernel).shared_bytes(config, problem, limits) <= resources.shared_bytes
    assert resources.shared_bytes <= limits.shared_per_block_optin_bytes
    assert resources.spill_bytes == 0 or cc == (7, 5)


@pytest.mark.parametrize("cc", known_ccs())
@pytest.mark.parametrize("kernel", HISTORICAL)
def test_defaults_are_feasible(kernel: str, cc: tuple[int, int]) -> None:
    limits = limits_for(cc)
    for head_dim in (16, 64, 80, 128, 256):
        for dtype in ("bfloat16", "float32"):
            problem = shape(head_dim, dtype, Causal.UPPER_LEFT)
            if get_kernel(kernel).unsupported(problem, limits) is None:
                config = get_kernel(kernel).default_config(problem, limits)
                assert get_kernel(kernel).violations(config, problem, limits) == (), (head_dim, dtype)


def test_padding_goes_to_the_next_power_of_two() -> None:
    assert [next_width(dim) for dim in (16, 64, 80, 128)] == [32, 128, 128, 256]
    assert "`16 <= head_dim <= 128` must hold" in str(
        get_kernel("flash_fwd_padded").unsupported(shape(256), limits_for((9, 0)))
    )


@pytest.mark.parametrize("kernel", HISTORICAL)
def test_a_head_dimension_out_of_range_is_named(kernel: str) -> None:
    for head_dim in (8, 272):
        reason = get_kernel(kernel).unsupported(shape(head_dim), limits_for((9, 0)))
        assert reason is not None
        assert f"must hold for {kernel}" in reason
        assert f"got head_dim={head_dim}" in reason


def test_the_first_algorithm_s_one_block_a_head_visits_all_tiles() -> None:
    kernel, problem = get_kernel("flash_v1"), shape()
    config = kernel.default_config(problem, limits_for((9, 0)))
    folded = kernel.as_forward(config, problem)[1]
    assert (folded.seqlen_q, folded.seqlen_k) == (64, 4096 // 64 * 4096)
    causal = kernel.as_forward(config, shape(causal=Causal.UPPER_LEFT))[1]
    assert causal.seqlen_k == 64 * 65 // 2 * 64
    assert causal.causal is Causal.NONE

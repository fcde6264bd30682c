"""The Hopper backward with ALiBi, masks and dropout without a GPU: its rules, its source and its machine code."""

from pathlib import Path

import pytest
import torch

from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import Causal
from tests.kernels.hopper.backward.test_flash_bwd_hopper_source import (
    HOPPER,
    KERNEL,
    TOLERANCE,
    check,
    gradients_under,
    shape_of,
)
from tests.kernels.hopper.backward.test_hopper_bwd_machine_code import loops_of_products
from tests.support.attention.masked_rows import masked_rows
from tests.support.compiles.measures import compile_resources
from tests.support.machine_code.kernels import machine_code, mnemonic
from tests.support.triton_modes import TRITON, compiled_here

NO, UPPER_LEFT, LOWER_RIGHT = Causal
COMBINATIONS = ("alibi boolean window=40:20", "alibi boolean dropout softcap", "alibi additive dropout")


@pytest.mark.triton_free
def test_dropout_needs_row_sums_in_the_product() -> None:
    problem = shape_of(300, 300, 128, "dropout")
    config = KernelConfig.of(KERNEL.name, KERNEL.default_config(problem, HOPPER).parameters | {"fold_delta": 0})
    assert "`fold_delta` 1" in KERNEL.violations(config, problem, HOPPER)[0]


# ---- gradients by its source on the CPU


@pytest.mark.triton_free
@pytest.mark.few(12)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("features", ["alibi", "boolean", "additive", "dropout", *COMBINATIONS])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients(head_dim: int, features: str, causal: Causal) -> None:
    check(shape_of(200, 301, head_dim, features, causal=causal))


@pytest.mark.triton_free
@pytest.mark.few(3)
@pytest.mark.parametrize("features", ["alibi", "boolean", "additive"])
@pytest.mark.parametrize("head_dim", [192, 256])
def test_gradients_of_wide_heads(head_dim: int, features: str) -> None:
    check(shape_of(100, 170, head_dim, features, causal=LOWER_RIGHT))


@pytest.mark.triton_free
@pytest.mark.few(4)
@pytest.mark.parametrize("features", ["alibi", "boolean", "additive", "dropout"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_groups_and_of_a_fixed_order(head_dim: int, features: str) -> None:
    sizes = {"batch": 2, "num_heads": 4, "num_heads_kv": 2}
    check(shape_of(130, 257, head_dim, features, **sizes), group_parts=1)
    check(shape_of(130, 257, head_dim, f"{features} deterministic", **sizes), group_parts=1)


@pytest.mark.triton_free
@pytest.mark.few(2)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("features", ["alibi", "boolean", "dropout"])
def test_gradients_of_packed_sequences(features: str, causal: Causal) -> None:
    lengths = (70, 0, 33, 130, 64), (150, 64, 0, 130, 300)
    check(shape_of(130, 300, 128, f"varlen {features}", causal=causal, batch=5), lengths=lengths)


LEAST = {dtype: torch.finfo(dtype).min for dtype in (torch.float16, torch.float32)}


@pytest.mark.triton_free
@pytest.mark.few(8)
@pytest.mark.parametrize("causal", [NO, LOWER_RIGHT])
@pytest.mark.parametrize("features", ["additive", "additive dropout", "alibi additive", "additive softcap"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.float16], ids=str)
def test_rows_that_finite_numbers_hide(
    mask_dtype: torch.dtype, head_dim: int, head_dim_v: int, features: str, causal: Causal
) -> None:
    """Their keys have equal probabilities, which add up to 1."""
    if head_dim > 128 and "dropout" in features:
        pytest.skip("such heads have no dropout")
    problem = shape_of(100, 170, head_dim, features, causal=causal, head_dim_v=head_dim_v, num_heads_kv=1)
    # float32 steps by 2^-8 beside -65504: at most half of that is the log-sum-exp wrong by, twice in base 2
    tolerance = 2.0**-8 if mask_dtype is torch.float16 else TOLERANCE
    check(problem, mask=masked_rows(100, 170, LEAST[mask_dtype], mask_dtype), tolerance=tolerance)


@pytest.mark.triton_free
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_a_mask_that_is_no_number_reaches_all_gradients_of_its_row(head_dim: int) -> None:
    mask = torch.zeros(1, 1, 100, 170)
    mask[..., 3, 1] = float("nan")
    problem = shape_of(100, 170, head_dim, "additive")
    dq, dk, dv = gradients_under(problem, mask)
    assert torch.equal(dq.isnan().all(-1), (torch.arange(100) == 3).expand(dq.shape[:3]))
    assert dk.isnan().all()
    assert dv.isnan().all()


# ---- machine code

SPILLED = [
    (64, LOWER_RIGHT, "alibi", 96),
    (64, NO, "boolean", 104),
    (64, NO, "additive", 104),
    (64, LOWER_RIGHT, "dropout", 184),
    (128, LOWER_RIGHT, "alibi", 64),
    (128, NO, "boolean", 48),
    (128, NO, "additive", 104),
    (128, LOWER_RIGHT, "dropout", 144),
    (256, NO, "boolean", 32),
]
"""head_dim, causal, features, and the bytes that may spill with Triton 3.6, none of them in a step at 128 and more."""


@compiled_here
@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("head_dim", "causal", "features", "spilled"), SPILLED, ids=str)
def test_machine_code(
    head_dim: int, causal: Causal, features: str, spilled: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    problem = shape_of(2048, 2048, head_dim, features, causal=causal, dtype="bfloat16")
    best = KERNEL.default_config(problem, HOPPER)
    resources = compile_resources(KERNEL, best, problem, (9, 0))
    assert resources.tensor_cores == "wgmma"
    assert 0 <= resources.shared_bytes - KERNEL.shared_bytes(best, problem, HOPPER) <= 1024
    if TRITON < (3, 9):
        assert resources.spill_bytes <= spilled
        steps = loops_of_products(machine_code(KERNEL, best, problem, tmp_path))
        assert len(steps) >= 2
        if head_dim >= 128:
            assert not [text for step in steps for text in step if mnemonic(text).startswith(("LDL", "STL"))]

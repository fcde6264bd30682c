"""The machine code of the Hopper backward, compiled without a GPU."""

from pathlib import Path

import pytest

from blocktune.kernels.hopper.backward.layout import is_wide
from blocktune.kernels.values.shape import Causal
from tests.kernels.hopper.backward.test_flash_bwd_hopper import step_loops, waits
from tests.kernels.hopper.backward.test_flash_bwd_hopper_general import (
    HOPPER,
    KERNEL,
    LOWER_RIGHT,
    NO,
    default,
    problem,
)
from tests.kernels.portable.backward.test_flash_bwd_dense import backward
from tests.support.compiles.measures import compile_resources
from tests.support.machine_code.kernels import loops, machine_code, mnemonic
from tests.support.triton_modes import compiled_here

FORMS = [
    (64, LOWER_RIGHT, "", 96),
    (128, LOWER_RIGHT, "", 288),
    (128, NO, "varlen softcap", 272),
    (192, LOWER_RIGHT, "window=100:-1 deterministic", 32),
    (256, NO, "", 32),
    (256, LOWER_RIGHT, "varlen", 80),
]
"""head_dim, causal, features, and the bytes that may spill with Triton 3.6, most of them out of the unmasked loops."""


def loops_of_products(code: list[tuple[int, str]]) -> list[list[str]]:
    """The loops that compute products and in which no other one ends."""
    found = [loop for loop in loops(code) if any("HGMMA" in text for _, text in loop)]
    ends = [loop[-1][0] for loop in found]
    inner = [loop for loop in found if not any(loop[0][0] <= end < loop[-1][0] for end in ends)]
    return [[text for _, text in loop] for loop in inner]


@compiled_here
@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("head_dim", "causal", "features", "spilled"), FORMS, ids=str)
def test_machine_code(
    head_dim: int, causal: Causal, features: str, spilled: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = backward(problem(1000, 777, head_dim, causal, features))
    best = default(shape)
    resources = compile_resources(KERNEL, best, shape, (9, 0))
    assert resources.tensor_cores == "wgmma"
    assert resources.registers == 168
    assert resources.num_warps == 12
    if triton.__version__.startswith("3.6."):
        assert resources.spill_bytes <= spilled
    assert 0 <= resources.shared_bytes - KERNEL.shared_bytes(best, shape, HOPPER) <= 1024
    assert resources.shared_bytes <= HOPPER.shared_per_block_optin_bytes
    code = machine_code(KERNEL, best, shape, tmp_path)
    if is_wide(shape):
        steps = loops_of_products(code)
        assert len(steps) == 4  # three of one warpgroup: edge or diagonal, no mask, window or the last queries
        reloading = 0
        for loop in steps:
            names = [mnemonic(text) for text in loop]
            reloading += any(name.startswith(("LDL", "STL")) for name in names)
            assert sum(name.startswith("HGMMA") for name in names) >= 2 * head_dim // 16 + 4
            assert sum(name == "WARPGROUP.ARRIVE" for name in names) <= 10  # not one for every instruction
        # no step waits for a spilled address, but for masked ones of packed sequences, and of a window by newer Tritons
        masked = 2 if "varlen" in features else "window" in features and not triton.__version__.startswith("3.6.")
        assert reloading <= masked
        shortest = sorted(steps, key=len)[:2]  # those without a mask
        assert not [text for loop in shortest for text in loop if mnemonic(text).startswith(("LDL", "STL"))]
        return
    for loop in step_loops(code) if "softcap" not in features else []:
        assert sum(wait > 0 for wait in waits(loop)) >= 2  # products run while others are waited for
        assert sum("HGMMA" in text for text in loop) >= 24  # five products


@compiled_here
@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("head_dim", "steps"), [(64, 4), (128, 4), (256, 3)])
def test_walks_of_both_directions_share_their_loops(
    head_dim: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of masked steps and one of others for each warpgroup that masks, and no spilled register in any by Triton
    3.6."""
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = backward(problem(1024, 1024, head_dim, LOWER_RIGHT, "deterministic"))
    found = loops_of_products(machine_code(KERNEL, default(shape), shape, tmp_path))
    assert len(found) == steps
    if triton.__version__.startswith("3.6."):
        assert not [text for loop in found for text in loop if mnemonic(text).startswith(("LDL", "STL"))]

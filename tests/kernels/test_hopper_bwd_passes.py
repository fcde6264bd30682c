"""What runs before and after the Hopper backward: in Triton's interpreter on the CPU, compiled where a GPU is."""

import os

import pytest
import torch
from triton import knobs

from blocktune.kernels.driver import read_driver
from blocktune.kernels.hopper_bwd_passes import finish_kernel, prepare_kernel

ON_GPU = bool(read_driver().devices) and not knobs.runtime.interpret
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [
    pytest.mark.skipif(
        not ON_GPU and not knobs.runtime.interpret,
        reason=f"no GPU, and TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET')} compiles kernels for one",
    ),
    # Triton's interpreter turns one-element arrays into numbers, which NumPy deprecates.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
BATCH, HEADS, LENGTH = 2, 3, 128


def drawn(layout: str, dim: int, dtype: torch.dtype) -> torch.Tensor:
    sizes = (BATCH, HEADS, LENGTH, dim) if layout == "bhsd" else (BATCH, LENGTH, HEADS, dim)
    made = torch.randn(sizes, device=DEVICE).to(dtype)
    return made if layout == "bhsd" else made.transpose(1, 2)


@pytest.mark.parametrize("layouts", [("bhsd", "bhsd"), ("bshd", "bhsd"), ("bhsd", "bshd")], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_statistics_and_an_empty_workspace(dim: int, layouts: tuple[str, str]) -> None:
    torch.manual_seed(0)
    out, dout = (drawn(layout, dim, torch.float16) for layout in layouts)
    lse = torch.randn(BATCH, HEADS, LENGTH, device=DEVICE)
    lse_log2, delta = torch.full_like(lse, float("nan")), torch.full_like(lse, float("nan"))
    sums = torch.full((lse.numel(), dim), float("nan"), device=DEVICE)
    counter = torch.full((1,), 7, dtype=torch.int32, device=DEVICE)
    prepare_kernel[(lse.numel() // 32,)](
        out, dout, lse, lse_log2, delta, sums, counter, *out.stride()[:3], *dout.stride()[:3], HEADS, LENGTH,
        HEAD_DIM=dim, ROWS=32, num_warps=4,
    )  # fmt: skip
    torch.testing.assert_close(delta, (out.float() * dout.float()).sum(-1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(lse_log2, lse / torch.log(torch.tensor(2.0)).item())
    assert not sums.any()
    assert counter.item() == 0


def in_register_order(dq: torch.Tensor, transposed: bool) -> torch.Tensor:
    """dq [rows, head_dim] as the main kernel leaves it: for every 64 queries two halves, each as in `add_dq`."""
    halves = []
    for block in dq.split(64):
        parts = [part.T for part in block.split(32)] if transposed else block.split(block.shape[1] // 2, dim=1)
        for part in parts:
            registers = part.reshape(4, 2, 8, part.shape[1] // 8, 4, 2)
            halves.append(registers.permute(3, 0, 2, 4, 1, 5).reshape(-1))
    return torch.cat(halves)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dim", [64, 128])
def test_sums_become_dq(dim: int, layout: str) -> None:
    torch.manual_seed(0)
    expected = torch.randn(BATCH, HEADS, LENGTH, dim, device=DEVICE)
    sums = in_register_order(expected.reshape(-1, dim), transposed=dim == 64)
    dq = drawn(layout, dim, torch.float16).fill_(float("nan"))
    finish_kernel[(BATCH * HEADS * LENGTH // 32,)](
        sums, dq, 0.25, *dq.stride()[:3], HEADS, LENGTH,
        HEAD_DIM=dim, HALF=32 if dim == 64 else 64, TRANSPOSED=dim == 64, num_warps=4,
    )  # fmt: skip
    torch.testing.assert_close(dq, (expected * 0.25).half())

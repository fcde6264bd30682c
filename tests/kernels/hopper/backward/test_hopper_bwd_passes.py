"""What runs before and after the Hopper backward: in Triton's interpreter on the CPU, compiled where a GPU is."""

import pytest
import torch

from blocktune.kernels.base.specialize import in_units
from blocktune.kernels.hopper.backward.pre_and_post import (
    finish_kernel,
    finish_rows_kernel,
    join_parts_kernel,
    prepare_kernel,
    prepare_rows_kernel,
)
from tests.support.triton_modes import DEVICE, ON_GPU, TRITON, runs

pytestmark = [
    pytest.mark.interpreted,
    runs,
    # Triton's interpreter turns one-element arrays into numbers, which NumPy deprecates.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
BATCH, HEADS, LENGTH = 2, 3, 128


def drawn(layout: str, dim: int, dtype: torch.dtype) -> torch.Tensor:
    sizes = (BATCH, HEADS, LENGTH, dim) if layout == "bhsd" else (BATCH, LENGTH, HEADS, dim)
    made = torch.randn(sizes, device=DEVICE).to(dtype)
    return made if layout == "bhsd" else made.transpose(1, 2)


@pytest.mark.parametrize("layouts", [("bhsd", "bhsd"), ("bshd", "bhsd"), ("bhsd", "bshd")], ids=str)
@pytest.mark.parametrize(("dim", "factor"), [(64, None), (128, None), (128, -2.5)])
def test_statistics_and_an_empty_workspace(dim: int, factor: float | None, layouts: tuple[str, str]) -> None:
    """With a factor as products begin with them: the log-sum-exp times it, and negative sums."""
    torch.manual_seed(0)
    out, dout = (drawn(layout, dim, torch.float16) for layout in layouts)
    lse = torch.randn(BATCH, HEADS, LENGTH, device=DEVICE)
    lse_log2, delta = torch.full_like(lse, float("nan")), torch.full_like(lse, float("nan"))
    sums = torch.full((lse.numel(), dim), float("nan"), device=DEVICE)
    counter = torch.full((1,), 7, dtype=torch.int32, device=DEVICE)
    prepare_kernel[(lse.numel() // 32,)](
        out, dout, lse, lse_log2, delta, sums, counter, factor, *out.stride()[:3], *dout.stride()[:3], HEADS, LENGTH,
        HEAD_DIM=dim, ROWS=32, num_warps=4,
    )  # fmt: skip
    sign = 1.0 if factor is None else -1.0
    torch.testing.assert_close(delta, sign * (out.float() * dout.float()).sum(-1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(lse_log2, lse / torch.log(torch.tensor(2.0)).item() * (factor or 1.0))
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


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("dim", "width"), [(64, 64), (128, 128), (40, 64)])
def test_parts_become_gradients_of_keys_and_values(dim: int, width: int, layout: str) -> None:
    """The parts of a key head stand next to each other, each with whole tiles of keys in the order of the registers."""
    torch.manual_seed(0)
    parts, padding = 4, 128
    left = [torch.randn(BATCH, HEADS, parts, LENGTH + padding, width, device=DEVICE) for _ in "kv"]
    sums = [in_register_order(each.reshape(-1, width), transposed=False) for each in left]
    dk, dv = (drawn(layout, dim, torch.float16).fill_(float("nan")) for _ in "kv")
    blocks = (LENGTH + padding) // 64
    strides, unit = in_units((*dk.stride()[:3], *dv.stride()[:3]))
    join_parts_kernel[2 * blocks * HEADS * BATCH, 2](
        *sums, dk, dv, None, 0.25, *strides, HEADS, LENGTH, blocks,
        HEAD_DIM=dim, HEAD_DIM_V=dim, WIDTH=width, PARTS=parts, UNIT=unit, num_warps=4,
    )  # fmt: skip
    expected = [each.sum(2)[:, :, :LENGTH, :dim] for each in left]
    torch.testing.assert_close(dk, (expected[0] * 0.25).half(), rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(dv, expected[1].half(), rtol=2e-3, atol=1e-3)


LENGTHS = (5, 70, 0, 64, 129)
"""Of packed sequences; the others are LENGTHS[1] or LENGTHS[4] long."""


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_parts_of_packed_sequences_become_gradients(layout: str) -> None:
    """Every sequence has the tiles of the longest one, and its rows behind those of the others."""
    torch.manual_seed(0)
    parts, width, blocks, tokens = 2, 64, 4, sum(LENGTHS)
    left = [torch.randn(len(LENGTHS), HEADS, parts, 64 * blocks, width, device=DEVICE) for _ in "kv"]
    sums = [in_register_order(each.reshape(-1, width), transposed=False) for each in left]
    sizes = (1, HEADS, tokens, width) if layout == "bhsd" else (1, tokens, HEADS, width)
    dk, dv = (torch.full(sizes, float("nan"), dtype=torch.float16, device=DEVICE) for _ in "kv")
    if layout == "bshd":
        dk, dv = dk.transpose(1, 2), dv.transpose(1, 2)
    begins = torch.tensor([sum(LENGTHS[:number]) for number in range(len(LENGTHS) + 1)], dtype=torch.int32)
    strides, unit = in_units((*dk.stride()[:3], *dv.stride()[:3]))
    join_parts_kernel[2 * blocks * HEADS * len(LENGTHS), 2](
        *sums, dk, dv, begins.to(DEVICE), 0.25, *strides, HEADS, 64 * blocks, blocks,
        HEAD_DIM=width, HEAD_DIM_V=width, WIDTH=width, PARTS=parts, UNIT=unit, num_warps=4,
    )  # fmt: skip
    for found, each, factor in ((dk, left[0], 0.25), (dv, left[1], 1.0)):
        rows = [whole.sum(1)[:, :length] for whole, length in zip(each, LENGTHS, strict=True)]
        torch.testing.assert_close(found[0], (torch.cat(rows, 1) * factor).half(), rtol=2e-3, atol=1e-3)


def starts(packed: bool, length: int, rows_of_head: int) -> list[tuple[int, int, int, int, int]]:
    """(entry, head, first token, length, first row of the workspace) of every head of every sequence."""
    if not packed:
        heads = [(batch, head) for batch in range(BATCH) for head in range(HEADS)]
        return [(batch, head, 0, length, (batch * HEADS + head) * rows_of_head) for batch, head in heads]
    begins = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
    found = []
    for number, (begin, own) in enumerate(zip(begins, LENGTHS, strict=True)):
        row = (begin + 64 * number) // 64 * 64
        found += [(0, head, begin, own, head * rows_of_head + row) for head in range(HEADS)]
    return found


def padded(length: int) -> int:
    return max(1, -(-length // 64)) * 64


def sizes_of(packed: bool, length: int) -> tuple[int, int, int, torch.Tensor | None]:
    """(tensor rows, rows of a head in the workspace, sequences, where they begin)."""
    if not packed:
        return length, padded(length), BATCH, None
    tokens = sum(LENGTHS)
    begins = torch.tensor([sum(LENGTHS[:number]) for number in range(len(LENGTHS) + 1)], dtype=torch.int32)
    return tokens, padded(tokens) + 64 * len(LENGTHS), len(LENGTHS), begins.to(DEVICE)


@pytest.mark.parametrize(("packed", "length", "ordered"), [(False, 70, True), (True, 129, False), (True, 129, True)])
@pytest.mark.parametrize(
    ("dim", "width", "factor"), [(40, 64, None), (136, 192, None), (104, 128, -2.5), (128, 128, 1.0)]
)
def test_statistics_of_any_rows(
    dim: int, width: int, factor: float | None, packed: bool, length: int, ordered: bool
) -> None:
    """With a factor as products begin with them, or under a soft cap: the sums are negative."""
    if ordered and not ON_GPU and TRITON >= (3, 9):
        pytest.skip("the interpreter of Triton 3.9 takes a mask that is one comparison of numbers for an int32")
    torch.manual_seed(0)
    tokens, rows, sequences, begins = sizes_of(packed, length)
    batch = 1 if packed else BATCH
    out, dout = (torch.randn(batch, HEADS, tokens, dim, device=DEVICE).half() for _ in range(2))
    lse = torch.randn(batch, HEADS, tokens, device=DEVICE)
    lse[:, 1, 2] = float("-inf")  # a row that sees no key
    count = rows * HEADS * batch
    lse_log2, delta = (torch.full((count,), float("nan"), device=DEVICE) for _ in range(2))
    sums = torch.full((count, width), float("nan"), device=DEVICE)
    counter = torch.full((1,), 7, dtype=torch.int32, device=DEVICE)
    turns = torch.full((count // 64,), 7, dtype=torch.int32, device=DEVICE) if ordered else None
    programs = padded(length) // 32
    strides, unit = in_units((*out.stride()[:3], *dout.stride()[:3]))
    prepare_rows_kernel[(programs * HEADS * sequences,)](
        out, dout, lse, lse_log2, delta, sums, counter, turns, begins, factor, None, 0, 0, None, *strides,
        HEADS * tokens, tokens, HEADS, length, rows, programs,
        HEAD_DIM_V=dim, WIDTH=width, ROWS=32, BLOCK_M=64, ADDITIVE=False, UNIT=unit, num_warps=4,
    )  # fmt: skip
    assert counter.item() == 0
    scale = factor or 1.0
    expected = (out.float() * dout.float()).sum(-1) * (1.0 if factor is None else -1.0)
    expected[:, 1, 2] = 0
    base_2 = (lse / torch.log(torch.tensor(2.0)).item()).where(lse.isfinite(), torch.tensor(1e30)) * scale
    for entry, head, begin, own, row in starts(packed, length, rows):
        end, last = row + own, row + padded(own)
        torch.testing.assert_close(delta[row:end], expected[entry, head, begin : begin + own], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(lse_log2[row:end], base_2[entry, head, begin : begin + own])
        assert (lse_log2[end:last] == torch.tensor(1e30) * scale).all()
        assert (delta[end:last] == 0).all()
        assert not sums[row:last].any()
        if turns is not None:
            assert not turns[row // 64 : last // 64].any()


@pytest.mark.parametrize(("packed", "length"), [(False, 70), (True, 129)])
@pytest.mark.parametrize(("dim", "width"), [(40, 64), (120, 128), (136, 192)])
def test_sums_of_any_rows_become_dq(dim: int, width: int, packed: bool, length: int) -> None:
    torch.manual_seed(0)
    tokens, rows, sequences, begins = sizes_of(packed, length)
    batch, transposed = 1 if packed else BATCH, width == 64
    sums = torch.randn(rows * HEADS * batch, width, device=DEVICE)
    dq = torch.full((batch, tokens, HEADS, dim), float("nan"), device=DEVICE).half().transpose(1, 2)
    programs, part = padded(length) // 64, 32 if transposed else 64
    strides, unit = in_units(dq.stride()[:3])
    finish_rows_kernel[(programs * HEADS * sequences * (2 if transposed else width // part),)](
        in_parts(sums, part, transposed), dq, begins, 0.25, *strides, HEADS, length, rows, programs,
        HEAD_DIM=dim, WIDTH=width, PART=part, TRANSPOSED=transposed, UNIT=unit, num_warps=4,
    )  # fmt: skip
    for entry, head, begin, own, row in starts(packed, length, rows):
        wanted = (sums[row : row + own, :dim] * 0.25).half()
        torch.testing.assert_close(dq[entry, head, begin : begin + own], wanted)


def in_parts(dq: torch.Tensor, part: int, transposed: bool) -> torch.Tensor:
    """`in_register_order` for parts of `part` columns, or queries."""
    parts = []
    for block in dq.split(64):
        for piece in [piece.T for piece in block.split(part)] if transposed else block.split(part, dim=1):
            registers = piece.reshape(4, 2, 8, piece.shape[1] // 8, 4, 2)
            parts.append(registers.permute(3, 0, 2, 4, 1, 5).reshape(-1))
    return torch.cat(parts)


def test_statistics_of_rows_that_see_nothing_and_of_huge_scores() -> None:
    lse = torch.randn(BATCH, HEADS, LENGTH, device=DEVICE)
    lse[0, 0, :4] = torch.tensor([float("-inf"), 1e8, -1e8, 1e5])
    out = torch.zeros(BATCH, HEADS, LENGTH, 64, dtype=torch.float16, device=DEVICE)
    lse_log2, delta = torch.full_like(lse, float("nan")), torch.full_like(lse, float("nan"))
    sums, counter = torch.empty(lse.numel(), 64, device=DEVICE), torch.ones(1, dtype=torch.int32, device=DEVICE)
    prepare_kernel[(lse.numel() // 32,)](
        out, out, lse, lse_log2, delta, sums, counter, None, *out.stride()[:3], *out.stride()[:3], HEADS, LENGTH,
        HEAD_DIM=64, ROWS=32, num_warps=4,
    )  # fmt: skip
    exact = lse.double() / torch.log(torch.tensor(2.0, dtype=torch.float64))
    exact[0, 0, 0] = 1e30
    exact[0, 0, 1:3] += exact[0, 0, 1:3].abs() * 2.0**-20
    torch.testing.assert_close(lse_log2.double(), exact, rtol=2e-7, atol=1e-6)

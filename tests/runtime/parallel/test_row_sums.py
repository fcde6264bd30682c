"""What blocks find for the same rows is added up in float32 and rounded once, however the rows of blocks overlap."""

import random

import pytest
import torch
from torch import Tensor

from blocktune.runtime.parallel.plan.additions import Addition, additions_of
from blocktune.runtime.parallel.plan.layout import Range
from blocktune.runtime.parallel.row_sums import AttentionSums, GradientSums

pytestmark = pytest.mark.triton_free
LENGTH, DIM = 24, 4
WHOLE = (0, LENGTH)
BLOCKS: dict[str, list[Range]] = {
    "none": [],
    "one": [WHOLE],
    "a ring": [WHOLE, (12, LENGTH), WHOLE, (12, LENGTH)],
    "a part": [(3, 9)],
    "parts": [(0, 12), (12, LENGTH), (6, 18)],
    "a window": [WHOLE, (0, 4)],
    "drawn": [tuple(sorted(random.Random(seed).sample(range(LENGTH + 1), 2))) for seed in range(9)],  # type: ignore[misc]
}
every_kind = pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)


def numbers(rows: Range, seed: int, *dims: int) -> Tensor:
    return torch.randn(2, 3, rows[1] - rows[0], *dims, generator=torch.Generator().manual_seed(seed))


def test_a_ring_of_three_by_hand() -> None:
    """The second half of the rows gets more after the second block, the first half does not."""
    assert additions_of(24, (WHOLE, WHOLE, (12, 24))) == (
        (),
        (Addition((0, 12), False, False), Addition((12, 24), False, True)),
        (Addition((12, 24), True, False),),
    )
    assert additions_of(24, ((0, 9), (9, 24))) == (
        (Addition((0, 9), False, False),),
        (Addition((9, 24), False, False),),
    )


@every_kind
def test_gradients_are_summed_in_float32_and_rounded_once(blocks: list[Range]) -> None:
    like = torch.zeros(2, 3, LENGTH, DIM, dtype=torch.bfloat16)
    sums, right = GradientSums(like, like.shape, blocks), torch.zeros(like.shape)
    for seed, rows in enumerate(blocks):
        part = numbers(rows, seed, DIM).bfloat16()
        right[:, :, slice(*rows)] += part
        sums.add(rows, part)
    assert torch.equal(sums.results(), right.bfloat16())


@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sunk", [False, True])
def test_attention_over_all_keys_and_sinks(blocks: list[Range], dtype: torch.dtype, sunk: bool) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    query, sinks = torch.zeros(2, 3, LENGTH, 1, dtype=dtype), torch.tensor([0.5, -1.0, 2.0], dtype=dtype)
    sums = AttentionSums(query, DIM, blocks, sinks if sunk else None)
    weights = sinks.double().exp()[:, None].expand(2, 3, LENGTH).clone() * sunk
    right = torch.zeros(2, 3, LENGTH, DIM, dtype=torch.float64)
    for seed, rows in enumerate(blocks):
        part, lse = numbers(rows, seed, DIM).to(dtype), numbers(rows, seed + 100).to(wide)
        right[:, :, slice(*rows)] += part.double() * lse.double().exp()[..., None]
        weights[:, :, slice(*rows)] += lse.double().exp()
        sums.add(rows, part, lse)
    out, lse = sums.results()
    assert (out.dtype, lse.dtype) == (dtype, wide)
    # a sink is one more part, so that there the first block's own rounding is followed by that of the result
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(out.double(), (right / weights[..., None]).nan_to_num(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), weights.log(), atol=1e-5 if wide is torch.float32 else 1e-12, rtol=1e-5)


def test_what_one_block_finds_for_all_rows_is_not_copied() -> None:
    part = numbers(WHOLE, 0, DIM).bfloat16()
    sums = GradientSums(part, part.shape, [WHOLE])
    sums.add(WHOLE, part)
    assert sums.results().data_ptr() == part.data_ptr()

"""The workspace of the Hopper backward: where the rows of each head and sequence lie in it."""

from itertools import pairwise

import pytest
import torch

from blocktune.kernels.hopper.backward import tiles
from blocktune.kernels.hopper.backward.launch import subtract_rows
from blocktune.kernels.hopper.backward.layout import Rows
from tests.kernels.hopper.backward.test_hopper_bwd_form import BLOCK_M, options_with, shape

pytestmark = pytest.mark.triton_free


def test_packed_sequences_have_blocks_of_their_own() -> None:
    lengths = (0, 1, 63, 64, 65, 0, 0, 128, 7)
    begins = [sum(lengths[:number]) for number in range(len(lengths))]
    problem = shape(128, 128, features="varlen", batch=len(lengths), num_heads=3)
    rows = Rows.of(problem, sum(lengths))
    taken: list[int] = []
    for head in range(3):
        for entry, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
            row = tiles.first_row.fn(entry, head, begin, 3, rows.of_head, options_with("PACKED"))
            assert row % BLOCK_M == 0
            assert head * rows.of_head <= row
            padded = max(1, -(-length // BLOCK_M)) * BLOCK_M
            assert row + padded <= (head + 1) * rows.of_head
            taken += range(row, row + padded)
    assert len(set(taken)) == len(taken) <= rows.count
    assert rows.longest == 128


@pytest.mark.parametrize("batch", [1, 3])
def test_values_are_subtracted_where_rows_of_the_workspace_lie(batch: int) -> None:
    own = shape(100, 100, batch=batch, num_heads=2, num_heads_kv=2)
    rows, values = Rows.of(own, 100), torch.rand(batch, 2, 100)
    delta = torch.zeros(rows.count)
    subtract_rows(delta, values, rows, None)
    for entry in range(batch):
        for head in range(2):
            first = (entry * 2 + head) * rows.of_head
            assert torch.equal(delta[first : first + 100], -values[entry, head])
    assert int((delta != 0).sum()) == values.numel()


def test_values_of_packed_sequences_are_subtracted_from_their_rows() -> None:
    """Whole blocks for every sequence, an empty one too; what comes after the last token is left alone."""
    begins, tokens = [0, 70, 70, 71, 200], 210
    own = shape(130, 130, features="varlen", batch=4, num_heads=2, num_heads_kv=2)
    rows, values = Rows.of(own, tokens), torch.rand(2, tokens)
    delta, wanted = torch.zeros(rows.count), torch.zeros(rows.count)
    subtract_rows(delta, values, rows, torch.tensor(begins, dtype=torch.int32))
    for head in range(2):
        for entry, (begin, end) in enumerate(pairwise(begins)):
            first = head * rows.of_head + (begin + entry * BLOCK_M) // BLOCK_M * BLOCK_M
            wanted[first : first + end - begin] -= values[head, begin:end]
    assert torch.equal(delta, wanted)

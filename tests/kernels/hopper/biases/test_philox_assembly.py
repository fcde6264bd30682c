"""The assembly by which Hopper's kernels draw for dropout, run by its text, next to the numbers of every pair."""

import pytest
import torch

from blocktune.kernels.hopper.biases.philox import keep_asm, keep_keys_asm, place_of_key, place_of_query
from tests.support.gluon.ptx import LANES, Warp
from tests.support.gluon.rows import kept_pairs, words_of

HEAD, OFFSET, SEED_LOW, SEED_HIGH = 5, 0x9000_0001, 0x8765_4321, 0xDEAD_BEEF
THRESHOLDS = [0, 1, 0x199A, 0x7F01, 0x7FFF, 0x8000, 0x80FF, 0xC000, 0xFFFF]
"""On both sides of the middle, where another bit decides, and with both ends of either byte."""
ROW, PAIR = LANES // 4, LANES % 4


def words(assembly: str, rows: torch.Tensor, *scalars: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run assembly for the rows r and r + 8 of each lane and return its two words."""
    pairs_of_operands = [(rows, rows + 8), (PAIR, PAIR), *((torch.full((32,), value),) * 2 for value in scalars)]
    operands = [operand for pair in pairs_of_operands for operand in pair]
    warp = Warp(dict(enumerate(operands, start=2)))
    warp.run(assembly)
    return warp.registers["$0"], warp.registers["$1"]


@pytest.mark.parametrize("least", THRESHOLDS)
@pytest.mark.parametrize("block_n", [64, 128])
def test_rows_are_queries(block_n: int, least: int) -> None:
    rows, first = ROW + 100, 3
    found = words(keep_asm(block_n // 4), rows, first, HEAD, OFFSET, SEED_LOW, SEED_HIGH, least)
    keys = 16 * first + torch.arange(block_n // 8)[None, :, None, None] * 8 + 2 * PAIR[:, None, None, None]
    for word, row in zip(found, (rows, rows + 8), strict=True):
        queries = row[:, None, None, None]
        kept = kept_pairs(keys + torch.arange(2), queries, HEAD, OFFSET, SEED_LOW, SEED_HIGH, least)
        assert torch.equal(word, words_of(kept, place_of_key).squeeze(1))


@pytest.mark.parametrize("least", THRESHOLDS)
def test_rows_are_keys(least: int) -> None:
    rows, first = ROW + 32, 192
    found = words(keep_keys_asm(), rows, first, HEAD, OFFSET, SEED_LOW, SEED_HIGH, least)
    queries = first + torch.arange(8)[None, :, None, None] * 8 + 2 * PAIR[:, None, None, None] + torch.arange(2)
    for word, row in zip(found, (rows, rows + 8), strict=True):
        kept = kept_pairs(row[:, None, None, None], queries, HEAD, OFFSET, SEED_LOW, SEED_HIGH, least)
        assert torch.equal(word & 0xFFFF, words_of(kept, place_of_query).squeeze(1))

"""Dropout's random words: against published answers, against Triton's, and as statistics."""

import pytest
import torch
import triton
import triton.language as tl

from blocktune.kernels.portable.forward.arguments import Dropout
from blocktune.kernels.portable.forward.scores import keep_tile
from blocktune.kernels.values.dropout import keep_arguments, keep_mask, keep_threshold, pair_numbers, philox, share_kept
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import Extras
from tests.support.triton_modes import DEVICE, runs

# The known answers for philox4x32 with 7 rounds in Random123's own kat_vectors (D. E. Shaw Research).
KNOWN_ANSWERS = [
    ((0x00000000,) * 4, (0x00000000,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_published_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(word.item() for word in philox((c0, c1, c2, c3), key)) == answer


def test_sixteen_neighbouring_keys_have_a_byte_each_above_a_shared_one() -> None:
    counter = tuple(
        torch.tensor([word]) for word in (1, 5, 3, 9)
    )  # keys 16 .. 31, query 5, batch entry 1, head 1, offset
    words = [word.item() for word in philox(counter, (7, 0))]
    shared = (words[0] ^ words[1] ^ words[2] ^ words[3]) >> 24
    # a word has the keys 2 i, 2 i + 1, 8 + 2 i, 9 + 2 i
    own = [words[key % 8 // 2] >> 8 * (key // 8 * 2 + key % 2) & 255 for key in range(16)]
    numbers = torch.tensor([256 * number + shared for number in own])
    heads, queries = torch.tensor([3]).view(-1, 1, 1), torch.tensor([5]).view(1, -1, 1)
    assert torch.equal(pair_numbers(heads, queries, 32, 7, 9)[0, 0, 16:], numbers)
    assert torch.equal(keep_mask(2, 2, 6, 31, 0.4, 7, 9)[1, 1, 5, 16:], (numbers >= keep_threshold(0.4))[:15])


def test_a_pair_is_decided_by_its_positions_alone() -> None:
    whole = keep_mask(3, 2, 40, 50, 0.4, 7, 9)
    assert torch.equal(keep_mask(3, 2, 11, 13, 0.4, 7, 9), whole[:, :, :11, :13])
    assert torch.equal(keep_mask(1, 2, 40, 50, 0.4, 7, 9, first_batch=2), whole[2:])


@pytest.mark.parametrize(("seed", "offset"), [(1, 0), (0, 1), (1 << 32, 0), (-1, 0)])
def test_every_word_of_seed_and_offset_counts(seed: int, offset: int) -> None:
    agreeing = (keep_mask(1, 1, 100, 100, 0.5, 0, 0) == keep_mask(1, 1, 100, 100, 0.5, seed, offset)).float().mean()
    assert 0.45 < agreeing < 0.55


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_keep_rate(p: float) -> None:
    keep = keep_mask(2, 3, 128, 256, p, 1234567890123, 5).double()
    deviation = (p * (1 - p) / keep.numel()) ** 0.5
    assert abs(keep.mean() - (1 - p)) <= 4 * deviation
    for dims in ((0, 1, 2), (0, 1, 3), (2, 3)):  # no key, query or head is preferred
        means = keep.mean(dims)
        assert (means - (1 - p)).abs().max() <= 5 * deviation * means.numel() ** 0.5


@pytest.mark.parametrize("p", [0.0, 0.1, 0.9999, 1 - 1e-9])
def test_the_share_that_is_kept_is_what_results_are_divided_by(p: float) -> None:
    assert share_kept(p) == 1 - keep_threshold(p) / 2**16 > 0
    assert abs(share_kept(p) - (1 - p)) <= 2**-16


@pytest.mark.parametrize(
    ("dim", "step"), [(2, 1), (3, 1), (3, 2), (3, 7), (3, 8), (3, 9), (3, 16), (1, 1)], ids=lambda value: str(value)
)
def test_neighbours_are_independent(dim: int, step: int) -> None:
    """Of pairs a step apart along heads, queries or keys, bytes of a word and keys of a counter included."""
    keep = keep_mask(1, 4, 256, 1024, 0.3, 99, 3).double() - share_kept(0.3)
    length = keep.shape[dim] - step
    products = keep.narrow(dim, 0, length) * keep.narrow(dim, step, length)
    assert products.mean().abs() <= 4 * 0.21 / products.numel() ** 0.5


def test_all_levels_are_as_frequent() -> None:
    """By chi squared, of 64 classes of the numbers."""
    heads, queries = torch.arange(4).view(-1, 1, 1), torch.arange(256).view(1, -1, 1)
    counts = (pair_numbers(heads, queries, 1024, 5, 0) // 1024).flatten().bincount(minlength=64).double()
    expected = counts.sum() / 64
    assert ((counts - expected) ** 2 / expected).sum() <= 63 + 5 * (2 * 63) ** 0.5


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_probabilities_outside_the_range_are_refused(p: float) -> None:
    with pytest.raises(UsageError, match="`0 <= dropout_p < 1` must hold"):
        keep_threshold(p)


def test_arguments_of_the_kernels_are_the_bits_of_words() -> None:
    arguments = keep_arguments(Extras(dropout_p=0.75, seed=(5 << 32) | 0xFFFFFFFE, offset=0x1_0000_0003))
    assert arguments == (-2, 5, 3, 0xC000)


@triton.jit(do_not_specialize=("seed_lo", "seed_hi", "offset", "threshold"))
def _write_keep_tile(
    Keep, seqlen_q, seqlen_k, seed_lo, seed_hi, offset, threshold, M: tl.constexpr, N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    if TRANSPOSED:
        rows, columns = tl.arange(0, M)[None, :], tl.arange(0, N)[:, None]
    else:
        rows, columns = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    keep = keep_tile(rows, 0, Dropout(head, None, seed_lo, seed_hi, offset, threshold), N, TRANSPOSED)
    pointers = Keep + (head * seqlen_q + rows) * seqlen_k + columns
    tl.store(pointers, keep.to(tl.uint8), mask=(rows < seqlen_q) & (columns < seqlen_k))


@runs
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("p", "seed", "offset"), [(0.1, 0, 0), (0.5, 0xFEDCBA9876543210, 0xFFFFFFFF), (0.75, -3, 17)])
def test_kernels_keep_the_same_pairs(p: float, seed: int, offset: int, transposed: bool) -> None:
    expected = keep_mask(2, 2, 50, 30, p, seed, offset, DEVICE)
    keep = torch.zeros(4, 50, 30, dtype=torch.uint8, device=DEVICE)
    words = keep_arguments(Extras(dropout_p=p, seed=seed, offset=offset))
    _write_keep_tile[(4,)](keep, 50, 30, *words, 64, 32, transposed)
    assert torch.equal(keep.view_as(expected).bool(), expected)

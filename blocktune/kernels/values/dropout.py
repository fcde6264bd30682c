"""Which (query, key) pairs dropout keeps: Philox4x32-7 of their positions, in plain PyTorch integers.

The kernels make the same decisions with `kernels/portable/forward/scores.py: keep_tile`, forward and backward, and
store none of them. Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section
4.3. Seven rounds are the fewest that pass the tests of its section 4 (BigCrush), and what flash-attention draws with.

Sixteen neighbouring keys share the rounds: a pair's number has 16 bits, of which the upper byte is its own, and the
lower one is shared by the sixteen. Every number is uniform, so dropout_p is rounded to a multiple of 2^-16, and results
are divided by the share of pairs that this keeps. The shared byte, the exclusive or of a byte of each word, is
independent of any three of the own ones. It decides about a pair only where the own byte equals the threshold's: two
pairs of a counter have a covariance of 2^-18 at most, which some 10^10 pairs would show.
"""

from typing import TYPE_CHECKING

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import Extras

if TYPE_CHECKING:
    import torch

    Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

KEYS = 16
"""Of one counter: four for each of its four words."""
ROUNDS = 7
LEVELS = 1 << 16
"""Of the numbers that decide."""
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL_STEPS = 0x9E3779B9, 0xBB67AE85
"""What is added to the two words of the key after each round."""
_WORD = 0xFFFFFFFF


def philox(counter: "Words", key: tuple[int, int]) -> "Words":
    """Return the four output words of Philox4x32-7.

    counter: four int64 tensors of 32-bit words that broadcast against each other. key: two 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product_words(c0, MULTIPLIERS[0])
        high1, low1 = _product_words(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL_STEPS[0]) & _WORD, (k1 + WEYL_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _product_words(words: "torch.Tensor", factor: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return the high and the low 32 bits of words * factor, without a product beyond 48 bits."""
    upper, lower = words * (factor >> 16), words * (factor & 0xFFFF)
    return (upper + (lower >> 16)) >> 16, ((upper << 16) + lower) & _WORD


def keep_threshold(dropout_p: float) -> int:
    """Return the threshold, which the random number of a kept pair reaches: dropout_p * 2^16, rounded, and below
    2^16.

    Raises:
        UsageError: dropout_p is outside [0, 1).
    """
    if not 0.0 <= dropout_p < 1.0:
        raise UsageError(
            f"`0 <= dropout_p < 1` must hold, but got dropout_p={dropout_p}. Give the part of the pairs to drop."
        )
    return min(round(dropout_p * LEVELS), LEVELS - 1)


def share_kept(dropout_p: float) -> float:
    """Return the probability that a pair is kept, by which results are divided: 1 - dropout_p to 16 bits.

    Raises:
        UsageError: dropout_p is outside [0, 1).
    """
    return 1.0 - keep_threshold(dropout_p) / LEVELS


def keep_mask(
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    p: float,
    seed: int,
    offset: int,
    device: "torch.device | str" = "cpu",
    *,
    first_batch: int = 0,
) -> "torch.Tensor":
    """Return bool [batch, num_heads, seqlen_q, seqlen_k], True where the pair is kept: with probability `share_kept`.

    seed, offset: integers of 64 bits, of the offset the low 32 count. first_batch: the number of the first batch entry,
    for a part of a batch. Needs about 50 bytes a pair while it runs.

    Raises:
        UsageError: p is outside [0, 1).
    """
    import torch

    def positions(first: int, count: int, *sizes: int) -> torch.Tensor:
        return torch.arange(first, first + count, dtype=torch.int64, device=device).view(sizes)

    threshold = keep_threshold(p)
    heads = positions(first_batch * num_heads, batch * num_heads, -1, 1, 1)
    numbers = pair_numbers(heads, positions(0, seqlen_q, 1, -1, 1), seqlen_k, seed, offset)
    return (numbers >= threshold).view(batch, num_heads, seqlen_q, seqlen_k)


def pair_numbers(
    heads: "torch.Tensor", queries: "torch.Tensor", seqlen_k: int, seed: int, offset: int
) -> "torch.Tensor":
    """Return the random number of 16 bits of every pair, int64 [heads, queries, seqlen_k].

    Sixteen neighbouring keys share a counter (key // 16, query, batch * num_heads + head, offset). The upper byte of a
    number is its own: byte key % 16 // 8 * 2 + key % 2 of the word key % 8 // 2. The lower one is the uppermost of all
    four words by exclusive or. heads, queries: int64 [heads, 1, 1] and [1, queries, 1], on the device where the result
    is wanted.
    """
    import torch

    sixteens = torch.arange(-(-seqlen_k // KEYS), dtype=torch.int64, device=heads.device).view(1, 1, -1)
    last = torch.tensor(offset & _WORD, dtype=torch.int64, device=heads.device)
    w0, w1, w2, w3 = philox((sixteens, queries, heads, last), (seed & _WORD, seed >> 32 & _WORD))
    shared = (w0 ^ w1 ^ w2 ^ w3) >> 24
    words = torch.stack((w0, w1, w2, w3), -1)
    # [.., eight, word, key % 2]
    own = torch.stack([words >> 8 * byte & 255 for byte in range(4)], -1).unflatten(-1, (2, 2)).transpose(-3, -2)
    return (own * 256 + shared[..., None, None, None]).flatten(-4)[..., :seqlen_k]


def keep_arguments(extras: Extras) -> tuple[int, int, int, int]:
    """Return (seed_lo, seed_hi, offset, threshold) for `keep_tile`, as int32 with the bits of a uint32: Triton compiles
    other code for an integer that needs 64 bits.

    Raises:
        UsageError: dropout_p is outside [0, 1).
    """
    if not extras.dropout_p:
        return 0, 0, 0, 0
    return *drawn_words(extras.seed, extras.offset), _as_int32(keep_threshold(extras.dropout_p))


def drawn_words(seed: int, offset: int) -> tuple[int, int, int]:
    """Return (seed_lo, seed_hi, offset), those of `keep_arguments` that change with each call."""
    return _as_int32(seed & _WORD), _as_int32(seed >> 32 & _WORD), _as_int32(offset & _WORD)


def _as_int32(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word

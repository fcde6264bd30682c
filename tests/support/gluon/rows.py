"""The assembly of the Hopper forwards as PyTorch: stand-ins of gluon_machine.py for what threads do with their rows."""

import math
import struct
from collections.abc import Callable
from typing import Any

import torch

from blocktune.kernels.hopper.biases.philox import place_of_key, place_of_query
from blocktune.kernels.values.dropout import philox


def half_word(*numbers: torch.Tensor) -> torch.Tensor:
    """Two e4m3, the first in the lower byte."""
    low, high = (number.to(torch.float8_e4m3fn).view(torch.uint8).long() for number in numbers)
    return low | high << 8


def whole_word(a: torch.Tensor, b: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return half_word(a, b) | high << 16


def across(rows: torch.Tensor, acc: torch.Tensor, layout: Any) -> torch.Tensor:
    """Numbers of rows, one for each of four threads, beside an accumulator."""
    del layout
    threads = torch.arange(acc.shape[1]) % 8 // 2
    return rows[:, threads]


def raised(base: torch.Tensor, scores: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Bases and factors of rows, four times the same: 4 below a maximum that may grow by 4."""
    assert (base == base[:, :1]).all()
    highest = scores.amax((1, 2, 3))[:, None].expand(base.shape) * scale
    above = highest - base
    factor = torch.where(above > 8, torch.exp2(4 - above), torch.ones(base.shape))
    return torch.where(above > 8, highest - 4, base), factor


def raised_top(
    scores: torch.Tensor,
    top: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[float, float],
    distance: torch.Tensor | None = None,
    natural: bool = False,
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Maxima with their scales, bases and factors, four times the same; a maximum may grow by 8 before it is raised."""
    maximum, scale = top
    assert (maximum == maximum[:, :1]).all()
    assert (scale == scale[:, :1]).all()
    apart = torch.zeros(maximum.shape) if distance is None else distance
    assert (apart == apart[:, :1]).all()
    own, above = (torch.as_tensor(value, dtype=torch.float32) for value in scales)
    highest = scores.amax((1, 2, 3))[:, None].expand(maximum.shape)
    base = fused(apart, scale, maximum)
    raises = highest.double() * scale - base > 8
    wanted = torch.where((highest * own).abs() < 2**27, own, above)
    base = torch.where(raises, highest * wanted, base)
    new = torch.where(raises, fused(-apart, wanted, highest * wanted), maximum)
    before = torch.where(wanted != scale, 0.0, torch.exp2(maximum - new)) if natural else torch.exp2(maximum - new)
    factor = torch.where(raises, before, 1.0)
    return (new, torch.where(raises, wanted, scale)), base, factor


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c, rounded once."""
    return (a.double() * b.double() + c.double()).float()


def scales_of(scale: float) -> tuple[float, float]:
    return scale, 2.0 ** math.ceil(math.log2(scale))


def of_scaled_scores(s: torch.Tensor, scale: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """In one instruction, as the hardware has it: the product is not rounded."""
    return torch.exp2((s.double() * scale.double() - maximum.double()).float())


def thread_positions(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, pairs = torch.arange(scores.shape[0], dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    return rows[:, None].expand(-1, 4), pairs.expand(len(rows), -1)


def numbers_of_keys(scores: torch.Tensor, eight: int) -> torch.Tensor:
    eights = torch.arange(scores.shape[1], dtype=torch.int32)[None, :, None, None] * eight
    return eights + torch.arange(2, dtype=torch.int32)


def bits_in_order(number: int) -> int:
    return number


def bits_of(words: torch.Tensor, count: int, place: Callable[[int], int]) -> torch.Tensor:
    """Whether the bit of each of a thread's `count` numbers in a row is set, [64, count / 2, 4, 2]."""
    places = torch.tensor([int(place(number)) for number in range(count)]).view(-1, 1, 2)
    return words[:, None, :, None].long() >> places & 1 == 1


def where_set(
    words: torch.Tensor, numbers: torch.Tensor, other: str, place: Callable[[int], int] = bits_in_order
) -> torch.Tensor:
    """`other` is a float32 as assembly has it: 0f and eight hexadecimal digits."""
    (value,) = struct.unpack(">f", bytes.fromhex(other.removeprefix("0f")))
    return torch.where(bits_of(words, 2 * numbers.shape[1], place), numbers, torch.tensor(value))


def words_of(kept: torch.Tensor, place: Callable[[int], int]) -> torch.Tensor:
    """Words [64, 4] whose bits say what [64, eights, 4, 2] does."""
    places = torch.tensor([int(place(number)) for number in range(2 * kept.shape[1])]).view(-1, 1, 2)
    return (kept.long() << places).sum((1, 3))


def kept_pairs(
    keys: torch.Tensor, queries: torch.Tensor, head: int, offset: int, low: int, high: int, least: int
) -> torch.Tensor:
    """Whether dropout keeps pairs, of keys and queries that broadcast."""
    low, high, offset, least = (int(word) % 2**32 for word in (low, high, offset, least))
    counter = keys.long() // 16, queries.long(), torch.tensor(int(head)), torch.tensor(offset)
    words = torch.broadcast_tensors(*philox(counter, (low, high)))
    word, byte = keys % 8 // 2, keys % 16 // 8 * 2 + keys % 2
    place = word.long().expand(words[0].shape)[None]
    own = torch.stack(words).gather(0, place)[0] >> 8 * byte & 255
    shared = (words[0] ^ words[1] ^ words[2] ^ words[3]) >> 24
    return own * 256 + shared >= least


def kept_bits(
    rows: torch.Tensor, pairs: torch.Tensor, first: int, head: int, offset: int, low: int, high: int, least: int, n: int
) -> torch.Tensor:
    """Words of a thread's row for the keys of its pair in every eight."""
    keys = int(first) * 16 + torch.arange(n // 8)[None, :, None, None] * 8 + pairs[:, None, :, None] * 2
    kept = kept_pairs(keys + torch.arange(2), rows[:, None, :, None], head, offset, low, high, least)
    return words_of(kept, place_of_key)


def kept_bits_of_keys(
    keys: torch.Tensor, pairs: torch.Tensor, query: int, head: int, offset: int, low: int, high: int, least: int
) -> torch.Tensor:
    """Words of a thread's key for the queries of its pair in every eight of 64."""
    queries = int(query) + torch.arange(8)[None, :, None, None] * 8 + pairs[:, None, :, None] * 2
    kept = kept_pairs(keys[:, None, :, None], queries + torch.arange(2), head, offset, low, high, least)
    return words_of(kept, place_of_query)


def choose(words: torch.Tensor, numbers: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return torch.where(bits_of(words, 2 * numbers.shape[1], place_of_query), numbers, others)


def dims_apart(low: torch.Tensor, high: torch.Tensor) -> list[torch.Tensor]:
    """[2, 8, pairs of dims] of the first and the last eight keys of every 16: of the even dims and of the odd ones
    words of two of the first keys and two of the last, each as two halves."""
    *_, pairs = low.shape
    keys = [half.contiguous().view(torch.uint8).view(2, 4, 2, pairs, 2) for half in (low, high)]
    # [2, 4, half, pairs, dim, key]
    words = torch.stack(keys, 2).permute(0, 1, 2, 4, 5, 3).contiguous()
    return [words[..., dim, :].contiguous().view(torch.int16).view(2, 8, pairs) for dim in range(2)]


ROWS: dict[str, Any] = {
    "dims_apart": dims_apart,
    "of_scaled_scores": of_scaled_scores,
    "raised_top": raised_top,
    "scales_of": scales_of,
    "binary_part": lambda number: 2.0 ** math.floor(math.log2(number)),
    "turned_if": lambda ahead, terms: -terms if ahead else terms,
    "thread_positions": thread_positions,
    "numbers_of_keys": numbers_of_keys,
    "where_set": where_set,
    "as_float32": lambda values: values.float(),
    "kept_bits": kept_bits,
    "kept_bits_of_keys": kept_bits_of_keys,
    "choose": choose,
    "half_word": half_word,
    "whole_word": whole_word,
    "across": across,
    "raised": raised,
    "times_factor": lambda acc, factor, layout: acc * across(factor, acc, layout),
    "as_rows": lambda rows, numbers: rows,
    "in_16_bits": lambda numbers: numbers.bfloat16(),
    "in_32_bits": lambda numbers: numbers.float(),
}
"""By the names of kernels/hopper/common/rows.py, kernels/hopper/biases/, kernels/hopper/fp8/ and row_maxima.py."""

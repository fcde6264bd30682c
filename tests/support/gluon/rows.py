"""The assembly of the Hopper forwards as PyTorch: stand-ins of gluon_machine.py for what threads do with their rows."""

import math
import struct
from typing import Any

import torch

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
    scores: torch.Tensor, top: tuple[torch.Tensor, torch.Tensor], scales: tuple[float, float]
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Maxima with their scales, and factors, four times the same; a maximum may grow by 8 before it is raised."""
    maximum, scale = top
    assert (maximum == maximum[:, :1]).all()
    assert (scale == scale[:, :1]).all()
    own, above = (torch.as_tensor(value, dtype=torch.float32) for value in scales)
    highest = scores.amax((1, 2, 3))[:, None].expand(maximum.shape)
    raises = highest.double() * scale - maximum > 8
    wanted = torch.where((highest * own).abs() < 2**27, own, above)
    new = torch.where(raises, highest * wanted, maximum)
    factor = torch.where(raises, torch.exp2(maximum - new), 1.0)
    return (new, torch.where(raises, wanted, scale)), factor


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


def where_set(words: torch.Tensor, numbers: torch.Tensor, other: str) -> torch.Tensor:
    """`other` is a float32 as assembly has it: 0f and eight hexadecimal digits."""
    is_set = (words[:, None, :, None].long() >> numbers_of_keys(numbers, 2)) & 1 == 1
    (value,) = struct.unpack(">f", bytes.fromhex(other.removeprefix("0f")))
    return torch.where(is_set, numbers, torch.tensor(value))


def kept_bits(
    rows: torch.Tensor, pairs: torch.Tensor, first: int, head: int, offset: int, low: int, high: int, least: int, n: int
) -> torch.Tensor:
    """Words of two bits for every eight keys of a thread's row, from the halves of its word of the eight."""
    low, high, offset, least = (int(word) % 2**32 for word in (low, high, offset, least))
    eights = torch.arange(n // 8)[:, None, None] + int(first)
    counter = eights, rows.long()[None], torch.tensor(int(head)), torch.tensor(offset)
    words = torch.stack(philox(counter, (low, high)), -1)  # [N / 8, 64, 4, 4]
    own = words.gather(-1, pairs.long()[None, :, :, None].expand(*words.shape[:3], 1))
    kept = torch.cat((own % 2**16, own // 2**16), -1) >= least
    places = torch.arange(n // 8)[:, None, None, None] * 2 + torch.arange(2)
    return (kept.long() << places).sum((0, 3))


def kept_bits_of_keys(
    keys: torch.Tensor, pairs: torch.Tensor, query: int, head: int, offset: int, low: int, high: int, least: int
) -> torch.Tensor:
    """Words of two bits for every eight queries, from the number of a thread's key in each of them."""
    low, high, offset, least = (int(word) % 2**32 for word in (low, high, offset, least))
    queries = torch.arange(8)[:, None, None, None] * 8 + pairs.long()[..., None] * 2 + torch.arange(2) + int(query)
    numbers = keys.long()[None, :, :, None]
    counter = numbers // 8, queries, torch.tensor(int(head)), torch.tensor(offset)
    words = torch.stack(philox(counter, (low, high)), -1)  # [8, 64, 4, 2, 4]
    own = words.gather(-1, (numbers % 8 // 2).expand(*words.shape[:-1])[..., None]).squeeze(-1)
    kept = torch.where(numbers % 2 == 1, own // 2**16, own % 2**16) >= least
    places = torch.arange(8)[:, None, None, None] * 2 + torch.arange(2)
    return (kept.long() << places).sum((0, 3))


def choose(words: torch.Tensor, numbers: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    is_set = (words[:, None, :, None].long() >> numbers_of_keys(numbers, 2)) & 1 == 1
    return torch.where(is_set, numbers, others)


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

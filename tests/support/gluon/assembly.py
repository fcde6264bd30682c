"""What the inline assembly of kernels/hopper/decode8 computes, in PyTorch, by its text."""

from collections.abc import Callable

import torch

from blocktune.kernels.hopper.decode8.numbers import COLUMNS_E4M3, COLUMNS_INT8, KEYS_E4M3, KEYS_INT8
from blocktune.kernels.hopper.decode8.ring.softmax import GREATEST

Tensor = torch.Tensor


def numbers(words: Tensor, dtype: torch.dtype) -> Tensor:
    """[.., 4] of float16: the numbers of every word [..]."""
    found = words.contiguous().unsqueeze(-1).view(torch.uint8)
    return found.view(dtype).to(torch.float16)


def columns(dtype: torch.dtype) -> Callable[..., tuple[Tensor, ...]]:
    """Neighbouring numbers of a word share a word."""

    def compute(words: Tensor) -> tuple[Tensor, ...]:
        return numbers(words, dtype).view(torch.int32).unbind(-1)

    return compute


def keys(dtype: torch.dtype) -> Callable[..., tuple[Tensor, ...]]:
    """The numbers at the same place of two words share a word."""

    def compute(even: Tensor, odd: Tensor) -> tuple[Tensor, ...]:
        pairs = torch.stack((numbers(even, dtype), numbers(odd, dtype)), -1)
        return pairs.view(torch.int32).squeeze(-1).unbind(-1)

    return compute


def greatest_of_warp(numbers: Tensor) -> tuple[Tensor, ...]:
    """Of [warps, ..], a thread of which has one number each."""
    return (numbers.amax(tuple(range(1, numbers.dim())), keepdim=True).expand_as(numbers).contiguous(),)


ASSEMBLY: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    COLUMNS_E4M3.value: columns(torch.float8_e4m3fn),
    COLUMNS_INT8.value: columns(torch.int8),
    KEYS_E4M3.value: keys(torch.float8_e4m3fn),
    KEYS_INT8.value: keys(torch.int8),
    GREATEST.value: greatest_of_warp,
}

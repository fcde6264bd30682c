"""The assembly of the 8-bit forward as PyTorch: stand-ins of gluon_machine.py for what a thread does with its rows."""

from typing import Any

import torch


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


def turned(
    acc: torch.Tensor, whole: torch.Tensor, due: torch.Tensor, factor: torch.Tensor, begins: bool, layout: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    sums = whole * across(due, acc, layout) + acc if begins else whole
    return acc * across(factor, acc, layout), sums


def raised(base: torch.Tensor, scores: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Bases and factors of rows, four times the same: 4 below a maximum that may grow by 4."""
    assert (base == base[:, :1]).all()
    highest = scores.amax((1, 2, 3))[:, None].expand(base.shape) * scale
    above = highest - base
    factor = torch.where(above > 8, torch.exp2(4 - above), torch.ones(base.shape))
    return torch.where(above > 8, highest - 4, base), factor


ROWS: dict[str, Any] = {
    "half_word": half_word,
    "whole_word": whole_word,
    "across": across,
    "turned": turned,
    "raised": raised,
    "times_factor": lambda acc, factor, layout: acc * across(factor, acc, layout),
    "as_rows": lambda rows, numbers: rows,
}
"""By the names of kernels/hopper/fp8/rows.py and kernels/hopper/fp8/steps.py."""

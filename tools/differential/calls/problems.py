"""What calls of attention functions share: the problem that they are to solve, and options."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tools.differential.cases.case import Case
from tools.differential.cases.enums import KV, QKV
from tools.differential.cases.tensors import Inputs
from tools.differential.truth import oracle
from tools.differential.truth.oracle import Problem

Subject: TypeAlias = Any
"""What is checked: the module `blocktune`, or one with its functions."""


@dataclass(frozen=True, slots=True)
class Calls:
    """ours(query, key, value) and theirs, both [batch, heads, rows, columns] in and out; theirs is None where PyTorch
    has no such function: then its error is that of the definition, computed in the type."""

    ours: Callable[[Tensor, Tensor, Tensor], Tensor]
    theirs: Callable[[Tensor, Tensor, Tensor], Tensor] | None
    problem: Callable[[Tensor, Tensor, Tensor], Problem]
    default: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """PyTorch's function with the backend that it chooses."""


def scale_of(case: Case) -> float:
    return case.kind.head_dim**-0.5 if case.scale is None else case.scale


def options_of(case: Case, inputs: Inputs) -> dict[str, Any]:
    """The arguments that the functions of FlashAttention share."""
    options = {
        "softmax_scale": case.scale,
        "causal": case.kind.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "alibi_slopes": inputs.slopes,
    }
    return options if case.kind.entry in (*QKV, *KV) else options | {"s_aux": inputs.sinks}


def distances(rows: int, keys: int, device: torch.device) -> Tensor:
    """[rows, keys], how far a key stands behind the diagonal, which ends in the lower right corner."""
    return torch.arange(keys, device=device)[None] - (torch.arange(rows, device=device) + keys - rows)[:, None]


def near(
    case: Case,
    inputs: Inputs,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    distance: Tensor,
    seen: Tensor,
    of_query: Tensor | None = None,
) -> Problem:
    """The problem with causal mask, window and ALiBi around the diagonal. distance and seen: [batch or 1, rows, keys];
    of_query: the sequence of each packed row."""
    left, right = case.window
    if case.kind.causal:
        seen = seen & (distance <= 0)
    if left >= 0:
        seen = seen & (distance >= -left)
    if right >= 0:
        seen = seen & (distance <= right)
    bias = None
    if inputs.slopes is not None:
        slopes = inputs.slopes.double()
        if of_query is not None and slopes.dim() == 2:  # [sequences, heads] -> [1, heads, rows, 1]
            by_row = slopes[of_query].T[None, :, :, None]
        else:
            by_row = (slopes if slopes.dim() == 2 else slopes[None])[:, :, None, None]
        bias = -by_row * distance.abs().double()[:, None]
    return Problem(query, key, value, scale_of(case), seen[:, None], bias, case.softcap, inputs.sinks, inputs.slopes)


def in_type(case: Case, problem: Problem) -> Tensor:
    """What the definition gives when all of it is computed in the type, differentiable. A bias that the type does not
    hold is the least number of it, which hides nothing for good."""
    bias = problem.bias
    if bias is not None:
        least = torch.finfo(problem.query.dtype).min
        bias = torch.where(bias == float("-inf"), bias, bias.clamp(min=least)).to(problem.query.dtype)
    return oracle.plain_attention(replace(problem, bias=bias))

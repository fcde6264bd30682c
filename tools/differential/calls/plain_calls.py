"""Calls with PyTorch's arguments, those of transformers, and merged parts."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from blocktune.runtime.api.hugging_face.attention import transformers_attention
from tools.differential.calls.problems import Calls, Subject, distances, scale_of
from tools.differential.cases.case import Case
from tools.differential.cases.enums import Mode
from tools.differential.cases.tensors import Inputs, hide
from tools.differential.truth import oracle
from tools.differential.truth.oracle import Problem


def plain_calls(case: Case, inputs: Inputs, subject: Subject) -> Calls:
    mask, rank = inputs.mask, case.kind.rank
    options: dict[str, Any] = {"is_causal": case.kind.causal, "scale": case.scale, "enable_gqa": case.kind.group > 1}
    given = None if mask is None else _with_rank(mask, rank)

    def ours(*tensors: Tensor) -> Tensor:
        ranked = (_with_rank(tensor, rank) for tensor in tensors)
        return _without_rank(subject.attention(*ranked, given, **options), rank)

    def default(*tensors: Tensor) -> Tensor:
        query, key, value = (_with_rank(tensor, rank) for tensor in tensors)
        return _without_rank(scaled_dot_product_attention(query, key, value, given, **options), rank)

    def theirs(*tensors: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return default(*tensors)

    def problem(query: Tensor, key: Tensor, value: Tensor) -> Problem:
        seen, bias = _visible_and_bias(mask, case)
        if case.kind.causal:
            rows, keys = (torch.arange(tensor.shape[2], device=tensor.device) for tensor in (query, key))
            seen = keys <= rows[:, None]
        return Problem(query, key, value, scale_of(case), seen, bias, mask=mask)

    rounds = case.kind.mask == "float32" and case.mode is not Mode.AUTOCAST and case.kind.dtype != "float32"
    return Calls(ours, None if rounds else theirs, problem, default)  # PyTorch rounds such a mask


def _visible_and_bias(mask: Tensor | None, case: Case) -> tuple[Tensor | None, Tensor | None]:
    """Which pairs a mask lets through, and what it adds to their scores."""
    if mask is None or mask.dtype is torch.bool:
        return mask, None
    bias = _as_used(mask, case).double()
    return bias != float("-inf"), bias


def _as_used(mask: Tensor, case: Case) -> Tensor:
    """An additive mask as the computation takes it: autocast converts it, too."""
    return mask.to(getattr(torch, case.kind.dtype)) if case.mode is Mode.AUTOCAST else mask


def _with_rank(tensor: Tensor, rank: int) -> Tensor:
    """A tensor of four dimensions with this many: the first batch entry or head alone, or one dimension more."""
    return {2: lambda: tensor[0, 0], 3: lambda: tensor[0], 4: lambda: tensor, 5: lambda: tensor[None]}[rank]()


def _without_rank(tensor: Tensor, rank: int) -> Tensor:
    return {2: lambda: tensor[None, None], 3: lambda: tensor[None], 4: lambda: tensor, 5: lambda: tensor[0]}[rank]()


def transformers_calls(case: Case, inputs: Inputs, subject: Subject) -> Calls:
    """A layer of transformers: with a mask it decides alone, without one a layer that is causal has a window."""
    mask, module = inputs.mask, torch.nn.Module()
    attend = getattr(subject, case.kind.entry, transformers_attention)
    sliding = case.window[0] + 1 if case.kind.window else None
    options: dict[str, Any] = {"scaling": case.scale, "is_causal": case.kind.causal, "sliding_window": sliding}
    options |= {"softcap": case.softcap or None, "s_aux": inputs.sinks}

    def ours(*tensors: Tensor) -> Tensor:
        out: Tensor = attend(module, *tensors, mask, **options)[0].transpose(1, 2)
        return out

    def problem(query: Tensor, key: Tensor, value: Tensor) -> Problem:
        seen, bias = _visible_and_bias(mask, case)
        if mask is None and query.shape[2] > 1 and case.kind.causal:  # from the upper left
            rows, keys = (torch.arange(tensor.shape[2], device=tensor.device) for tensor in (query, key))
            seen = (keys <= rows[:, None]) & (keys > rows[:, None] - (sliding or query.shape[2]))
        elif mask is None and sliding is not None:
            seen = distances(query.shape[2], key.shape[2], query.device) > -sliding
        return Problem(query, key, value, scale_of(case), seen, bias, case.softcap, inputs.sinks)

    def default(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(
            query, key, value, mask, scale=case.scale, enable_gqa=query.shape[1] > key.shape[1]
        )

    has_own = mask is not None and not case.softcap and inputs.sinks is None
    return Calls(ours, None, problem, default if has_own else None)


def merge_calls(case: Case, inputs: Inputs, subject: Subject) -> Calls:
    """Two parts of the keys, by the definition in float32, which the function merges. A graph may capture it."""
    device = inputs.query.tensor.device
    generator = torch.Generator(device).manual_seed(case.seed + 3)
    seen = torch.rand(case.batch, 1, case.seqlen_q, case.seqlen_k, generator=generator, device=device) > 0.3
    hide(seen, case, generator)
    first = case.seqlen_k // 3

    def part(query: Tensor, key: Tensor, value: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        own = Problem(query, key[:, :, rows], value[:, :, rows], scale_of(case), seen[..., rows])
        out, sums = oracle.plain_attention(own.wide(torch.float32)).to(query.dtype), oracle.log_sum_exp(own)
        if case.unwritten:
            out = out.masked_fill(sums.isneginf()[..., None], float("nan"))
        return out.transpose(1, 2), sums.float()

    def ours(*tensors: Tensor) -> Tensor:
        parts = (part(*tensors, rows) for rows in (slice(first), slice(first, None)))
        (out_a, sums_a), (out_b, sums_b) = parts
        out: Tensor = subject.merge_partial(out_a, sums_a, out_b, sums_b)[0].transpose(1, 2)
        return out

    def problem(query: Tensor, key: Tensor, value: Tensor) -> Problem:
        return Problem(query, key, value, scale_of(case), seen)

    return Calls(ours, None, problem)

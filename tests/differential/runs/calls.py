"""The calls of a case: ours, PyTorch's, and the problem that both are to solve."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tests.differential.cases.caches import Cache
from tests.differential.cases.case import Case, Entry, Mode
from tests.differential.cases.short_caches import ShortCache
from tests.differential.cases.tensors import Inputs
from tests.differential.truth import oracle
from tests.differential.truth.oracle import Problem

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


def calls_of(case: Case, inputs: Inputs, subject: Subject) -> Calls:
    """The calls of a case with these inputs."""
    makers = {
        Entry.SDPA: _sdpa,
        Entry.FLASH: _flash,
        Entry.VARLEN: _varlen,
        Entry.KVCACHE: _kvcache,
    }
    return makers[case.kind.entry](case, inputs, subject)


def scale_of(case: Case) -> float:
    return case.kind.head_dim**-0.5 if case.scale is None else case.scale


def _sdpa(case: Case, inputs: Inputs, subject: Subject) -> Calls:
    mask, rank = inputs.mask, case.kind.rank
    options: dict[str, Any] = {"is_causal": case.kind.causal, "scale": case.scale, "enable_gqa": case.kind.group > 1}
    given = None if mask is None else _ranked(mask, rank)

    def ours(*tensors: Tensor) -> Tensor:
        ranked = (_ranked(tensor, rank) for tensor in tensors)
        return _unranked(subject.attention(*ranked, given, **options), rank)

    def default(*tensors: Tensor) -> Tensor:
        query, key, value = (_ranked(tensor, rank) for tensor in tensors)
        return _unranked(scaled_dot_product_attention(query, key, value, given, **options), rank)

    def theirs(*tensors: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return default(*tensors)

    def problem(query: Tensor, key: Tensor, value: Tensor) -> Problem:
        seen = mask if mask is not None and mask.dtype is torch.bool else None
        if case.kind.causal:
            rows, keys = (torch.arange(tensor.shape[2], device=tensor.device) for tensor in (query, key))
            seen = keys <= rows[:, None]
        bias = None if mask is None or mask.dtype is torch.bool else _as_used(mask, case).double()
        if bias is not None:
            seen = bias != float("-inf")
        return Problem(query, key, value, scale_of(case), seen, bias)

    return Calls(ours, theirs, problem, default)


def _as_used(mask: Tensor, case: Case) -> Tensor:
    """An additive mask as the computation takes it: autocast converts it, too."""
    return mask.to(getattr(torch, case.kind.dtype)) if case.mode is Mode.AUTOCAST else mask


def _ranked(tensor: Tensor, rank: int) -> Tensor:
    """A tensor of four dimensions with this many: the first batch entry or head alone, or one dimension more."""
    return {2: lambda: tensor[0, 0], 3: lambda: tensor[0], 4: lambda: tensor, 5: lambda: tensor[None]}[rank]()


def _unranked(tensor: Tensor, rank: int) -> Tensor:
    return {2: lambda: tensor[None, None], 3: lambda: tensor[None], 4: lambda: tensor, 5: lambda: tensor[0]}[rank]()


def _options(case: Case, inputs: Inputs) -> dict[str, Any]:
    """The arguments that the functions of FlashAttention share."""
    return {
        "softmax_scale": case.scale,
        "causal": case.kind.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "alibi_slopes": inputs.slopes,
        "s_aux": inputs.sinks,
    }


def _flash(case: Case, inputs: Inputs, subject: Subject) -> Calls:
    options = _options(case, inputs) | {"deterministic": case.deterministic}

    def ours(*tensors: Tensor) -> Tensor:
        turned = (tensor.transpose(1, 2) for tensor in tensors)
        return subject.flash_attn_func(*turned, **options).transpose(1, 2)

    def problem(query: Tensor, key: Tensor, value: Tensor) -> Problem:
        distance = _distance(query.shape[2], key.shape[2], query.device)[None]
        return _near(case, inputs, query, key, value, distance, torch.ones_like(distance, dtype=torch.bool))

    return Calls(ours, None, problem)


def _varlen(case: Case, inputs: Inputs, subject: Subject) -> Calls:
    device = inputs.query.tensor.device
    bounds = [_bounds(lengths, device) for lengths in zip(*case.sequences, strict=True)]
    longest = [max(lengths) for lengths in zip(*case.sequences, strict=True)]
    options = _options(case, inputs) | {"deterministic": case.deterministic}

    places: tuple[Tensor, Tensor] | None = None
    if case.kind.page_size:
        options["block_table"] = pages_of(case, device)
        places = places_in_pages(options["block_table"], case)

    def ours(*tensors: Tensor) -> Tensor:
        query, *others = (tensor[0].transpose(0, 1) for tensor in tensors)
        if places is not None:
            others = [in_pages(tensor, options["block_table"], case, places) for tensor in others]
        return subject.flash_attn_varlen_func(query, *others, *bounds, *longest, **options).transpose(0, 1)[None]

    def problem(query: Tensor, key: Tensor, value: Tensor) -> Problem:
        """The sequences next to each other, of which each sees itself."""
        count = torch.arange(len(case.sequences), device=device)
        lengths = torch.tensor(case.sequences, device=device)
        of_query, of_key = (count.repeat_interleave(lengths[:, side]) for side in (0, 1))
        within_q, within_k = (
            torch.arange(own.numel(), device=device) - bound[:-1].long()[own]
            for own, bound in zip((of_query, of_key), bounds, strict=True)
        )
        diagonal = (lengths[:, 1] - lengths[:, 0])[of_query]
        distance = within_k[None] - (within_q + diagonal)[:, None]
        own = of_query[:, None] == of_key[None]
        return _near(case, inputs, query, key, value, distance[None], own[None], of_query)

    return Calls(ours, None, problem)


def _kvcache(case: Case, inputs: Inputs, subject: Subject) -> Calls:
    device = inputs.query.tensor.device
    cache = Cache.of(case, device)
    short = ShortCache.of(case, cache, device) if case.kind.cache_type else None
    entries = torch.arange(case.batch, device=device)[:, None]

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """key and value are what the caches hold in the end, before keys are turned; the call appends the last rows."""
        key, value = (key, value) if short is None else short.read(key, value)
        new: list[Tensor | None] = [None, None]
        if case.appended:
            new = [tensor.transpose(1, 2)[entries, cache.new_places()] for tensor in (key, value)]
        caches = [cache.filled(tensor) for tensor in (key, value)]
        options = _options(case, inputs) | cache.arguments(query.dtype)
        if short is not None:
            caches, options = short.stored(*caches), options | short.arguments()
        return subject.flash_attn_with_kvcache(query.transpose(1, 2), *caches, *new, **options).transpose(1, 2)

    def problem(query: Tensor, key: Tensor, value: Tensor) -> Problem:
        key, value = (key, value) if short is None else short.read(key, value)
        full = cache.lengths - cache.padding + case.appended
        keys, rows = (torch.arange(tensor.shape[2], device=device) for tensor in (key, query))
        diagonal = full[:, None] - query.shape[2]
        distance = keys[None, None] - (rows[None] + diagonal)[..., None]
        seen = (keys < full[:, None])[:, None].expand_as(distance)
        return _near(case, inputs, *cache.turned(query, key), value, distance, seen)

    return Calls(ours, None, problem)


def pages_of(case: Case, device: torch.device) -> Tensor:
    """A block table of shuffled pages for the keys of packed sequences."""
    count = max(1, *(-(-keys // case.kind.page_size) for _, keys in case.sequences))
    generator = torch.Generator(device).manual_seed(case.seed + 1)
    total = len(case.sequences) * count
    return torch.randperm(total, generator=generator, device=device).view(-1, count).int()


def places_in_pages(table: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """The page and the row in it of every packed key."""
    lengths = torch.tensor([keys for _, keys in case.sequences], device=table.device)
    own = torch.arange(len(case.sequences), device=table.device).repeat_interleave(lengths)
    within = torch.arange(own.numel(), device=table.device) - (lengths.cumsum(0) - lengths)[own]
    return table.long()[own, within // case.kind.page_size], within % case.kind.page_size


def in_pages(packed: Tensor, table: Tensor, case: Case, places: tuple[Tensor, Tensor]) -> Tensor:
    """Packed keys or values [tokens, heads, columns] in the pages of a table; 7 where no key is. A graph may capture
    it."""
    pages = packed.new_full((table.numel(), case.kind.page_size, *packed.shape[1:]), 7.0)
    return pages.index_put(places, packed)


def _bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    sums = torch.tensor((0, *lengths), device=device).cumsum(0)
    return sums.to(torch.int32)


def _distance(rows: int, keys: int, device: torch.device) -> Tensor:
    """[rows, keys], how far a key stands behind the diagonal, which ends in the lower right corner."""
    return torch.arange(keys, device=device)[None] - (torch.arange(rows, device=device) + keys - rows)[:, None]


def _near(
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
    return Problem(query, key, value, scale_of(case), seen[:, None], bias, case.softcap, inputs.sinks)


def in_type(case: Case, problem: Problem) -> Tensor:
    """What the definition gives when all of it is computed in the type, differentiable."""
    bias = None if problem.bias is None else problem.bias.to(problem.query.dtype)
    return oracle.plain_attention(replace(problem, bias=bias))

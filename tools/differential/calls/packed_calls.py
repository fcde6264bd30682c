"""Calls of functions of packed sequences, whose keys may lie in pages."""

from typing import Any

import torch
from torch import Tensor

from tools.differential.calls.flash_calls import in_one
from tools.differential.calls.problems import Calls, Subject, near, options_of
from tools.differential.cases.caches import table_of
from tools.differential.cases.case import Case
from tools.differential.cases.enums import QKV, Entry
from tools.differential.cases.tensors import Inputs
from tools.differential.truth.oracle import Problem


def packed_calls(case: Case, inputs: Inputs, subject: Subject) -> Calls:
    device = inputs.query.tensor.device
    bounds = [_bounds(lengths, device) for lengths in zip(*case.sequences, strict=True)]
    longest = [max(lengths) for lengths in zip(*case.sequences, strict=True)]
    longest = [long + extra for long, extra in zip(longest, case.slack, strict=True)]
    pages = pages_of(case, device) if case.kind.page_size else None
    places = None if pages is None else places_in_pages(pages, case)
    options = _torch_options(case) if case.kind.entry is Entry.TORCH_VARLEN else _flash_options(case, inputs)
    if pages is not None:
        used = bounds[1].diff()
        options["block_table"] = table_of(pages, used, case)
        options |= {"seqused_k": used} if case.kind.entry is Entry.TORCH_VARLEN else {}
    count = 1 if case.kind.entry in QKV else 2
    function = getattr(subject, case.kind.entry)

    def ours(*tensors: Tensor) -> Tensor:
        query, key, value = (tensor[0].transpose(0, 1) for tensor in tensors)
        if places is not None and pages is not None:
            key, value = (in_pages(tensor, pages, case, places) for tensor in (key, value))
        out = function(*in_one(case, query, key, value), *bounds[:count], *longest[:count], **options)
        return out.transpose(0, 1)[None]

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
        return near(case, inputs, query, key, value, distance[None], own[None], of_query)

    return Calls(ours, None, problem)


def _flash_options(case: Case, inputs: Inputs) -> dict[str, Any]:
    return options_of(case, inputs) | {"deterministic": case.deterministic}


def _torch_options(case: Case) -> dict[str, Any]:
    options: dict[str, Any] = {"is_causal": case.kind.causal, "scale": case.scale, "window_size": case.window}
    return options | {"enable_gqa": case.kind.group > 1, "num_splits": case.num_splits or None}


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

"""Calls of FlashAttention's functions of dense tensors and of caches."""

import torch
from torch import Tensor

from tools.differential.calls.problems import Calls, Subject, distances, near, options_of
from tools.differential.cases.caches import Cache
from tools.differential.cases.case import Case
from tools.differential.cases.enums import KV, QKV
from tools.differential.cases.short_caches import ShortCache
from tools.differential.cases.tensors import Inputs
from tools.differential.truth.oracle import Problem


def flash_calls(case: Case, inputs: Inputs, subject: Subject) -> Calls:
    options = options_of(case, inputs) | {"deterministic": case.deterministic}

    function = getattr(subject, case.kind.entry)

    def ours(*tensors: Tensor) -> Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
        return function(*in_one(case, query, key, value), **options).transpose(1, 2)

    def problem(query: Tensor, key: Tensor, value: Tensor) -> Problem:
        distance = distances(query.shape[2], key.shape[2], query.device)[None]
        return near(case, inputs, query, key, value, distance, torch.ones_like(distance, dtype=torch.bool))

    return Calls(ours, None, problem)


def cache_calls(case: Case, inputs: Inputs, subject: Subject) -> Calls:
    device = inputs.query.tensor.device
    cache = Cache.of(case, device)
    short = ShortCache.of(case, cache, device) if case.kind.cache_type else None
    entries = torch.arange(case.batch, device=device)[:, None]

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """key and value are what the caches hold in the end, before keys are turned; the call appends the last rows."""
        key, value = cache.shared(key), cache.shared(value)
        key, value = (key, value) if short is None else short.read(key, value)
        new: list[Tensor | None] = [None, None]
        if case.appended:
            new = [tensor.transpose(1, 2)[entries, cache.new_places()] for tensor in (key, value)]
        caches = [cache.filled(tensor) for tensor in (key, value)]
        options = options_of(case, inputs) | cache.arguments(query.dtype)
        if short is not None:
            caches, options = short.stored(*caches), options | short.arguments()
        caches = [cache.sliced(tensor) for tensor in caches]
        return subject.flash_attn_with_kvcache(query.transpose(1, 2), *caches, *new, **options).transpose(1, 2)

    def problem(query: Tensor, key: Tensor, value: Tensor) -> Problem:
        key, value = cache.shared(key), cache.shared(value)
        key, value = (key, value) if short is None else short.read(key, value)
        full = cache.lengths - cache.padding + case.appended
        keys, rows = (torch.arange(tensor.shape[2], device=device) for tensor in (key, query))
        diagonal = full[:, None] - query.shape[2]
        distance = keys[None, None] - (rows[None] + diagonal)[..., None]
        seen = (keys < full[:, None])[:, None].expand_as(distance)
        return near(case, inputs, *cache.turned(query, key), value, distance, seen)

    return Calls(ours, None, problem)


def in_one(case: Case, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """The tensors [..., heads, columns] as the function takes them, in one or two if it is one of those."""
    if case.kind.entry in QKV:
        return (torch.stack((query, key, value), -3),)
    return (query, torch.stack((key, value), -3)) if case.kind.entry in KV else (query, key, value)

"""Attention over a paged cache in float32: few peers read pages."""

import torch
from torch import Tensor

from tools.bench.drawn_peers.problem import Problem


def attend_pages(problem: Problem) -> Tensor:
    """Return the output [batch, queries, heads, dim] of a cache's entries, one after the other."""
    assert problem.table is not None
    outputs = [_entry(problem, number, count) for number, count in enumerate(problem.cell.lengths)]
    return torch.stack(outputs).transpose(1, 2)


def _entry(problem: Problem, number: int, count: int) -> Tensor:
    """Return the output [heads, queries, dim] of an entry with `count` keys."""
    assert problem.table is not None
    pages = problem.table[number].long()
    key, value = (
        cache[pages].flatten(0, 1)[:count].transpose(0, 1).float().repeat_interleave(problem.shape.group_size, 0)
        for cache in (problem.key, problem.value)
    )
    scores = problem.query[number].transpose(0, 1).float() @ key.mT * problem.scale
    if problem.is_causal:
        queries = problem.shape.seqlen_q
        hidden = torch.ones(queries, count, dtype=torch.bool, device=scores.device).triu(count - queries + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ value

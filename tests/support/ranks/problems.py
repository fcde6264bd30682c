"""What the bench of ranks computes: its problems, their FLOP, its checks, and the shapes of all of their blocks."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import torch

from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.runtime.parallel.block_attention import ScoreOptions, call_of
from blocktune.runtime.parallel.plan.blocks import AttentionBlock, Sight
from blocktune.runtime.parallel.plan.layout import SequenceLayout
from blocktune.runtime.parallel.plan.schedule import RankProblem, Schedule, columns_of, possible
from blocktune.runtime.parallel.plan.steps import steps_of
from tests.support.ranks.cases import Case

HEADS, HEADS_KV, DIM = 32, 8, 128
BACKWARD = 3.5
"""FLOP of forward and backward, in forwards."""
CHECKED = 1037
"""Tokens of the checks: no tile divides them."""


def flop(length: int, direction: str, window: int | None = None) -> float:
    """Return the FLOP of causal attention over a whole sequence."""
    pairs = length * (length + 1) / 2
    if window is not None and window < length:
        pairs -= (length - window - 1) * (length - window) / 2
    return 4 * DIM * HEADS * pairs * (BACKWARD if direction == "both" else 1.0)


def problem(length: int, ranks: int, window: float = inf, layout: str = "zigzag") -> RankProblem:
    """Return what the model is told of a call."""
    make = SequenceLayout.zigzag if layout == "zigzag" else SequenceLayout.contiguous
    return RankProblem(
        batch=1, num_heads=HEADS, num_heads_kv=HEADS_KV, head_dim=DIM, head_dim_v=DIM, element_bytes=2,
        sight=Sight(window, 0, (0, length)), layout=make(length, ranks),
    )  # fmt: skip


def check_cases(ranks: int, device_type: str) -> Iterator[tuple[str, Case]]:
    """Yield the checks by name: every schedule of a causal call, and a ring with everything else; the last is causal on
    a mesh."""
    plain = Case(ranks=ranks, schedule="ring", seqlen=CHECKED, heads=(8, 4), dims=(128, 128), dtype="bfloat16")
    if device_type == "cpu":
        plain = replace(plain, seqlen=41, dims=(8, 8))
    last, causal = plain.seqlen, replace(plain, causal=True)
    yield from (("causal", replace(causal, schedule=str(one))) for one in Schedule)
    yield "full", plain
    yield "window", replace(causal, window=(last // 9, -1))
    yield "packed", replace(causal, packed=(0, last // 7, last // 2, last))
    yield "sinks and softcap", replace(causal, sinks=True, softcap=4.0)
    yield "deterministic", replace(causal, deterministic=True, lse=False)
    even = replace(causal, seqlen=last // (2 * ranks) * 2 * ranks)  # which PyTorch wants, too
    yield "causal", replace(even, columns=2)


def blocks_of_problem(problem: RankProblem) -> Iterator[tuple[AttentionBlock, int, int]]:
    """Yield every block of every schedule and rank, and how many query heads and key heads it has."""
    for schedule in possible(problem):
        columns = columns_of(problem, schedule)
        heads, heads_kv = problem.num_heads // columns, max(problem.num_heads_kv // columns, 1)
        layout = problem.layout.joined(columns)
        for rank in range(layout.num_ranks):
            for step in steps_of(layout, problem.sight, rank, gathers=schedule is Schedule.ALL_GATHER):
                yield from ((block, heads, heads_kv) for block in step.blocks)


def shapes_of(problem: RankProblem, numbers: ScoreOptions) -> set[AttentionShape]:
    """Return the shapes of all blocks, forward and backward."""
    found = set()
    for block, heads, heads_kv in set(blocks_of_problem(problem)):
        (first_q, last_q), (first_k, last_k) = block.queries, block.keys
        query = torch.empty(1, dtype=torch.bfloat16).expand(1, heads, last_q - first_q, problem.head_dim)
        key = torch.empty(1, dtype=torch.bfloat16).expand(1, heads_kv, last_k - first_k, problem.head_dim)
        value = torch.empty(1, dtype=torch.bfloat16).expand(1, heads_kv, last_k - first_k, problem.head_dim_v)
        call = call_of(block, numbers, query.device)
        found |= {call.shape(query, key, value, direction) for direction in (Direction.FORWARD, Direction.BACKWARD)}
    return found

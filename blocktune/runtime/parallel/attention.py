"""Attention over a sequence that is split over ranks."""

from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import UNLIMITED
from blocktune.runtime.dispatch.call_checks import check_dimensions
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention
from blocktune.runtime.dispatch.sdpa_arguments import autocast_tensors
from blocktune.runtime.parallel.agreement import agree
from blocktune.runtime.parallel.head_trade import HeadsGathered, HeadTrade, TokensGathered, heads_of, tokens_of
from blocktune.runtime.parallel.plan.layout import ZIGZAG, SequenceLayout
from blocktune.runtime.parallel.plan.schedule import RankProblem, Schedule
from blocktune.runtime.parallel.plan.steps import steps_of
from blocktune.runtime.parallel.ranks import Ranks
from blocktune.runtime.parallel.request import AUTO, Bounds, Request, description_of, request_of
from blocktune.runtime.parallel.ring import RankRing, RingAttention


@torch.compiler.disable  # type: ignore[untyped-decorator]
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    is_causal: bool = False,
    window: tuple[int, int] = (UNLIMITED, UNLIMITED),
    scale: float | None = None,
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    cu_seqlens: Bounds = None,
    layout: SequenceLayout | str = ZIGZAG,
    schedule: str = AUTO,
    deterministic: bool = False,
    return_lse: bool = False,
    dispatcher: Dispatcher = attention,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return attention of this rank's queries over the keys of all ranks. Every rank of the group calls it, and the
    backward of its result; differentiable once.

    q [batch, num_heads, length, head_dim], k and v [batch, num_heads_kv, length, head_dim(_v)] hold the tokens that
    `split_sequence` gives this rank, which may be none. All ranks pass the same other arguments, or all of them raise.

    Args:
        q: queries.
        k: keys of the same tokens.
        v: values.
        group: a process group, or a DeviceMesh with one or two dimensions: along its first one keys travel, along its
            second one heads are traded for tokens. All processes by default.
        is_causal: a token sees itself and those before it in the whole sequence.
        window: (left, right), how many tokens before and after itself a token sees; -1 for no bound. Only keys that a
            rank's queries see travel to it.
        scale: of the products, 1 / sqrt(head_dim) by default.
        softcap: scores go through softcap * tanh(score / softcap); 0 for none.
        s_aux: attention sinks [num_heads], equal on all ranks. Their gradient is this rank's share: add it up over the
            group, as that of any parameter that all ranks hold.
        cu_seqlens: where packed sequences begin among the tokens of all ranks, and the end of the last one; the batch
            is 1 then. The host reads it, so a tuple or a tensor on the CPU is best.
        layout: which tokens each rank holds, as `split_sequence` got it. A name is enough where all ranks hold equally
            many, or with cu_seqlens that end with the last token.
        schedule: `ring`, `all_gather` or `ulysses`; `auto` takes the one that `tune_schedule` measured for such a call,
            or else the one that a model of bytes and overlap finds fastest. On a mesh of two dimensions `ring` and
            `all_gather` say how keys travel along the first.
        deterministic: gradients are equal to the bit in every run.
        return_lse: whether to return the log-sum-exp too.
        dispatcher: whose configs serve the blocks.

    Returns:
        the output [batch, num_heads, length, head_dim_v]; with return_lse also the log-sum-exp [batch, num_heads,
        length] in float32 (float64 of float64), both of this rank's tokens.

    Raises:
        UsageError: arguments of a rank do not fit each other, or ranks call differently. All ranks raise it before keys
            are sent.
        RankError: another rank ended, or took no part within the group's timeout.
    """
    ranks = Ranks.of(group)
    try:
        check_dimensions("[batch, heads, length, dim]", q=q, k=k, v=v)
        q, k, v = autocast_tensors(q, k, v)
        request = request_of(
            ranks,
            q,
            k,
            v,
            is_causal=is_causal,
            window=window,
            scale=scale,
            softcap=softcap,
            s_aux=s_aux,
            cu_seqlens=cu_seqlens,
            layout=layout,
            schedule=schedule,
            deterministic=deterministic,
        )
    except UsageError as error:
        agree(ranks, {}, error)
        raise
    agree(ranks, description_of(request, ranks, q, k, v), device=q.device)
    out, lse = _attend(request, ranks, q, k, v, dispatcher, lse=return_lse)
    return (out, lse) if return_lse else out


def _attend(
    request: Request, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, dispatcher: Dispatcher, *, lse: bool
) -> tuple[Tensor, Tensor]:
    """Return the output and, if it is wanted, the log-sum-exp of this rank's tokens."""
    problem, sinks = request.problem, request.sinks
    if request.schedule is Schedule.ULYSSES:
        ranks = ranks.as_row()
    layout = problem.layout.joined(ranks.num_columns)
    steps = steps_of(layout, problem.sight, ranks.row_number, gathers=request.schedule is Schedule.ALL_GATHER)
    ring = RankRing(ranks.column, steps, request.numbers, dispatcher)
    if ranks.num_columns == 1:
        found: tuple[Tensor, Tensor] = RingAttention.apply(q, k, v, sinks, ring)
        return found
    of_queries, of_keys = _trades(problem, ranks)
    q, k, v = TokensGathered.apply((of_queries, of_keys, of_keys), q, k, v)
    if sinks is not None:
        sinks = sinks[slice(*of_queries.heads[of_queries.rank])]
    out, sums = RingAttention.apply(q, k, v, sinks, ring)
    if not lse:
        return HeadsGathered.apply(of_queries, out)[0], sums
    out, sums = HeadsGathered.apply(of_queries, out, sums.unsqueeze(-1))
    return out, sums.squeeze(-1)


def _trades(problem: RankProblem, ranks: Ranks) -> tuple[HeadTrade, HeadTrade]:
    """Return what the ranks of this rank's row trade: of queries, and of keys and values."""
    first = ranks.row_number * ranks.num_columns
    tokens = tokens_of(problem.layout, range(first, first + ranks.num_columns))
    of_queries, of_keys = heads_of(problem.num_heads, problem.num_heads_kv, ranks.num_columns)
    trades = (HeadTrade(ranks.row, ranks.column_number, tokens, heads) for heads in (of_queries, of_keys))
    return next(trades), next(trades)

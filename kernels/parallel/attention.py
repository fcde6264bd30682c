"""Attention over a sequence that is split over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import Any, TypeAlias

import torch
from torch import Tensor

from blocktune.kernels.api.flash_arguments import real_number, window_of
from blocktune.kernels.dispatch.call_checks import check_dimensions, check_sinks, check_sizes, check_softcap
from blocktune.kernels.dispatch.dispatcher import Dispatcher, attention
from blocktune.kernels.dispatch.plan import autocasted, needs_gradients, scale_of
from blocktune.kernels.parallel.agreement import agree, digest
from blocktune.kernels.parallel.block_attention import Numbers
from blocktune.kernels.parallel.head_trade import HeadsGathered, HeadTrade, TokensGathered, heads_of, tokens_of
from blocktune.kernels.parallel.measured_schedule import link, measured
from blocktune.kernels.parallel.plan.blocks import Sight
from blocktune.kernels.parallel.plan.cost import fastest, machine_of
from blocktune.kernels.parallel.plan.layout import ZIGZAG, SequenceLayout, layout_named
from blocktune.kernels.parallel.plan.schedule import Problem, Schedule, require_possible
from blocktune.kernels.parallel.plan.steps import steps_of
from blocktune.kernels.parallel.ranks import Ranks
from blocktune.kernels.parallel.ring import Ring, RingAttention
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import UNLIMITED

AUTO = "auto"

Bounds: TypeAlias = Tensor | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Request:
    """A call whose arguments fit each other on this rank."""

    problem: Problem
    numbers: Numbers
    sinks: Tensor | None
    schedule: Schedule


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
    q, k, v = autocasted(q, k, v)
    try:
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
    agree(ranks, _description(request, ranks, q, k, v), device=q.device)
    out, lse = _attended(request, ranks, q, k, v, dispatcher, lse=return_lse)
    return (out, lse) if return_lse else out


def request_of(
    ranks: Ranks,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    window: tuple[int, int] = (UNLIMITED, UNLIMITED),
    scale: float | None = None,
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    cu_seqlens: Bounds = None,
    layout: SequenceLayout | str = ZIGZAG,
    schedule: str = AUTO,
    deterministic: bool = False,
) -> Request:
    """Return the call with the arguments of `context_parallel_attention`.

    Raises:
        UsageError: arguments do not fit each other.
    """
    check_dimensions("[batch, heads, length, dim]", q=q, k=k, v=v)
    check_sizes(q, k, v, names="q, k and v")
    softcap, (left, right) = real_number("softcap", softcap), window_of(window)
    check_softcap(softcap)
    length, bounds = q.shape[2], _bounds(cu_seqlens, q.shape[0])
    placed = _layout(layout, bounds[-1] if bounds else length * ranks.size, ranks.size)
    _check_length(q, k, placed, ranks)
    bounds = bounds or (0, placed.seqlen)
    _check_end(bounds, placed)
    right = 0 if is_causal else right
    sight = Sight(inf if left == UNLIMITED else left, inf if right == UNLIMITED else right, bounds)
    problem = Problem(
        batch=q.shape[0],
        num_heads=q.shape[1],
        num_heads_kv=k.shape[1],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        element_bytes=q.element_size(),
        sight=sight,
        layout=placed,
        num_columns=ranks.num_columns,
    )
    numbers = Numbers(
        scale_of(q, None if scale is None else real_number("scale", scale)),
        softcap,
        deterministic or torch.are_deterministic_algorithms_enabled(),
    )
    sinks, backward = check_sinks(s_aux, q.shape[1], q), needs_gradients(q, k, v, s_aux)
    return Request(problem, numbers, sinks, _schedule(schedule, problem, ranks, q.device, backward=backward))


def _schedule(name: str, problem: Problem, ranks: Ranks, device: torch.device, *, backward: bool) -> Schedule:
    """Return the schedule with a name, or the one that was measured fastest, or that should be.

    Raises:
        UsageError: there is no such schedule, or heads cannot be divided for it.
    """
    if name == AUTO:
        known = measured(problem, link(ranks.column, device.type), backward=backward)
        return fastest(problem, machine_of(device)) if known is None else known
    if name not in tuple(Schedule):
        raise UsageError(f"`schedule` is {AUTO}, {', '.join(Schedule)}, but got {name!r}. Take one of these.")
    require_possible(problem, Schedule(name))
    return Schedule(name)


@lru_cache(maxsize=64)
def _layout(layout: SequenceLayout | str, seqlen: int, num_ranks: int) -> SequenceLayout:
    return layout_named(layout, seqlen, num_ranks)


def _bounds(cu_seqlens: Bounds, batch: int) -> tuple[int, ...]:
    """Return where packed sequences begin, and the end of the last one; nothing without packed sequences.

    Raises:
        UsageError: they do not ascend from 0, or there is more than one batch entry.
    """
    if cu_seqlens is None:
        return ()
    bounds = tuple(int(bound) for bound in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens))
    if len(bounds) < 2 or bounds[0] != 0 or any(after < before for before, after in pairwise(bounds)):
        raise UsageError(
            f"`cu_seqlens` must begin with 0 and ascend, with two numbers at least, but got {bounds[:8]}. Give the "
            "sums of the lengths before each sequence, and of all."
        )
    if batch != 1:
        raise UsageError(f"`batch` must be 1 with cu_seqlens, but got {batch}. Pack the batch into one sequence.")
    return bounds


def _check_length(q: Tensor, k: Tensor, layout: SequenceLayout, ranks: Ranks) -> None:
    """Check that this rank has the tokens of its part.

    Raises:
        UsageError: it has more or fewer.
    """
    wanted = layout.length(ranks.number)
    if q.shape[2] != wanted or k.shape[2] != wanted:
        raise UsageError(
            f"q, k and v must have the {wanted} tokens of part {ranks.number} of {layout.seqlen} tokens, but got "
            f"{q.shape[2]} queries and {k.shape[2]} keys. Split the sequence with `split_sequence` and the same layout."
        )


def _check_end(bounds: tuple[int, ...], layout: SequenceLayout) -> None:
    """Check that packed sequences end within the tokens.

    Raises:
        UsageError: they do not.
    """
    if bounds[-1] > layout.seqlen:
        raise UsageError(
            f"`cu_seqlens[-1] <= tokens` must hold, but got {bounds[-1]} and {layout.seqlen} tokens on all ranks. Give "
            "lengths that add up to no more."
        )


def _description(request: Request, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Return what must be equal on all ranks."""
    problem, numbers, sinks = request.problem, request.numbers, request.sinks
    grads = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in (q, k, v, sinks)]
    return {
        "seqlen": problem.layout.seqlen,
        "batch": problem.batch,
        "num_heads": problem.num_heads,
        "num_heads_kv": problem.num_heads_kv,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "dtype": str(q.dtype),
        "device": q.device.type,
        "window": [str(problem.sight.left), str(problem.sight.right)],
        "scale": numbers.scale,
        "softcap": numbers.softcap,
        "s_aux": sinks is not None,
        "deterministic": numbers.deterministic,
        "requires_grad": grads,
        "schedule": str(request.schedule),
        "ranks": [ranks.num_rows, ranks.num_columns],
        "layout": digest(problem.layout),
        "cu_seqlens": digest(problem.sight.bounds),
    }


def _attended(
    request: Request, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, dispatcher: Dispatcher, *, lse: bool
) -> tuple[Tensor, Tensor]:
    """Return the output and, if it is wanted, the log-sum-exp of this rank's tokens."""
    problem, sinks = request.problem, request.sinks
    if request.schedule is Schedule.ULYSSES:
        ranks = ranks.as_row()
    layout = problem.layout.joined(ranks.num_columns)
    steps = steps_of(layout, problem.sight, ranks.row_number, gathers=request.schedule is Schedule.ALL_GATHER)
    ring = Ring(ranks.column, steps, request.numbers, dispatcher)
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


def _trades(problem: Problem, ranks: Ranks) -> tuple[HeadTrade, HeadTrade]:
    """Return what the ranks of this rank's row trade: of queries, and of keys and values."""
    first = ranks.row_number * ranks.num_columns
    tokens = tokens_of(problem.layout, range(first, first + ranks.num_columns))
    of_queries, of_keys = heads_of(problem.num_heads, problem.num_heads_kv, ranks.num_columns)
    trades = (HeadTrade(ranks.row, ranks.column_number, tokens, heads) for heads in (of_queries, of_keys))
    return next(trades), next(trades)

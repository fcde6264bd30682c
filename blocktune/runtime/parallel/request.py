"""A call of attention over several ranks: whether its arguments fit each other, and what all ranks must agree on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import inf
from operator import index
from typing import Any, TypeAlias

import torch
from torch import Tensor

from blocktune.kernels.values.errors import UsageError, WrongTypeError
from blocktune.kernels.values.features import UNLIMITED
from blocktune.runtime.api.flash_arguments import real_number, window_of
from blocktune.runtime.dispatch.call_checks import check_dimensions, check_sinks, check_sizes, check_softcap
from blocktune.runtime.dispatch.obstacles import needs_gradients
from blocktune.runtime.dispatch.sdpa_arguments import scale_of
from blocktune.runtime.parallel.agreement import digest
from blocktune.runtime.parallel.block_attention import ScoreOptions
from blocktune.runtime.parallel.measured_schedule import link, measured_schedule
from blocktune.runtime.parallel.plan.blocks import Sight
from blocktune.runtime.parallel.plan.cost import fastest, machine_of
from blocktune.runtime.parallel.plan.layout import ZIGZAG, SequenceLayout, find_layout
from blocktune.runtime.parallel.plan.schedule import RankProblem, Schedule, require_possible
from blocktune.runtime.parallel.ranks import Ranks

AUTO = "auto"

Bounds: TypeAlias = Tensor | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Request:
    """A call whose arguments fit each other on this rank."""

    problem: RankProblem
    numbers: ScoreOptions
    sinks: Tensor | None
    schedule: Schedule


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
    softcap, (left, right) = real_number("softcap", softcap), window_of(window, "window")
    check_softcap(softcap)
    length, bounds = q.shape[2], _bounds(cu_seqlens, q.shape[0])
    placed = _layout(_layout_argument(layout), bounds[-1] if bounds else length * ranks.size, ranks.size)
    _check_length(q, k, placed, ranks)
    bounds = bounds or (0, placed.seqlen)
    _check_end(bounds, placed)
    right = 0 if is_causal else right
    sight = Sight(inf if left == UNLIMITED else left, inf if right == UNLIMITED else right, bounds)
    problem = RankProblem(
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
    numbers = ScoreOptions(
        scale_of(q, None if scale is None else real_number("scale", scale)),
        softcap,
        deterministic or torch.are_deterministic_algorithms_enabled(),
    )
    sinks, backward = check_sinks(s_aux, q.shape[1], q), needs_gradients(q, k, v, s_aux)
    return Request(problem, numbers, sinks, _schedule(schedule, problem, ranks, q.device, backward=backward))


def _schedule(name: str, problem: RankProblem, ranks: Ranks, device: torch.device, *, backward: bool) -> Schedule:
    """Return the schedule with a name, or the one that was measured fastest, or that should be.

    Raises:
        UsageError: there is no such schedule, or heads cannot be divided for it.
    """
    if name == AUTO:
        known = measured_schedule(problem, link(ranks.column, device.type), backward=backward)
        return fastest(problem, machine_of(device), backward=backward) if known is None else known
    if name not in tuple(Schedule):
        raise UsageError(f"`schedule` must be {AUTO} or one of {', '.join(Schedule)}, but got {name!r}.")
    require_possible(problem, Schedule(name))
    return Schedule(name)


def _layout_argument(layout: SequenceLayout | str) -> SequenceLayout | str:
    """Return what may be a layout.

    Raises:
        WrongTypeError: it is neither a layout nor a name.
    """
    if not isinstance(layout, (SequenceLayout, str)):
        raise WrongTypeError(
            f"`layout` must be a name or a SequenceLayout, but got {type(layout).__name__}. Give the one that the "
            "sequence was split by."
        )
    return layout


@lru_cache(maxsize=64)
def _layout(layout: SequenceLayout | str, seqlen: int, num_ranks: int) -> SequenceLayout:
    return find_layout(layout, seqlen, num_ranks)


def _bounds(cu_seqlens: Bounds, batch: int) -> tuple[int, ...]:
    """Return where packed sequences begin, and the end of the last one; nothing without packed sequences.

    Raises:
        WrongTypeError: they are no whole numbers.
        UsageError: they do not ascend from 0, or there is more than one batch entry.
    """
    if cu_seqlens is None:
        return ()
    given = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    try:
        bounds = tuple(map(index, given))
    except TypeError as error:
        raise WrongTypeError(
            f"`cu_seqlens` must be whole numbers, but got {given!r:.100}. Give a tuple or an int32 tensor."
        ) from error
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


def description_of(request: Request, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
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

"""Decoding over a cache whose rows are spread over ranks: each call brings partial results to all ranks once."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blocktune.kernels.portable.partials.gathered import merge_gathered
from blocktune.kernels.portable.sinks.results import with_sinks
from blocktune.kernels.values.errors import RankError, UsageError
from blocktune.runtime.api.kv_cache import flash_attn_with_kvcache
from blocktune.runtime.dispatch.call_checks import check_dimensions, check_sinks
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention
from blocktune.runtime.parallel.agreement import agree, silent_ranks
from blocktune.runtime.parallel.messages import Messages, ProcessGroup
from blocktune.runtime.parallel.ranks import Ranks

_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""The latter is its name in older versions of PyTorch."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()  # type: ignore[untyped-decorator]
def context_parallel_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    group: Any = None,
    cache_seqlens: Tensor | int | None = None,
    block_table: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    dispatcher: Dispatcher = attention,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return attention of the same queries on all ranks over the caches of all ranks. Inference only.

    Every query sees all rows that are filled, on whichever rank they are. Which rank holds which rows does not matter,
    and a rank may hold none.

    Args:
        q: [batch, seqlen_q, num_heads, head_dim], equal on all ranks.
        k_cache: this rank's rows [batch, seqlen_k, num_heads_kv, head_dim], or pages with block_table.
        v_cache: likewise, with head_dim_v.
        group: as in `context_parallel_attention`.
        cache_seqlens: int32 [batch], how many of this rank's rows are filled, or one number for all; all by default.
        block_table: as in `flash_attn_with_kvcache`.
        scale: of the products, 1 / sqrt(head_dim) by default.
        softcap: 0 for none.
        s_aux: attention sinks [num_heads], equal on all ranks.
        num_splits: as in `flash_attn_with_kvcache`.
        return_lse: whether to return the log-sum-exp too.
        dispatcher: whose configs serve the call.

    Returns:
        the output [batch, seqlen_q, num_heads, head_dim_v], equal on all ranks; with return_lse also the log-sum-exp
        float32 [batch, num_heads, seqlen_q].

    Raises:
        UsageError: arguments of a rank do not fit each other, or ranks call differently. All ranks raise it in the
            first call of a kind.
        RankError: another rank ended, or took no part within the group's timeout.
    """
    ranks = Ranks.of(group)
    options = {"cache_seqlens": cache_seqlens, "block_table": block_table, "softmax_scale": scale, "softcap": softcap}
    try:
        check_dimensions("[batch, seqlen, heads, dim]", q=q, k_cache=k_cache, v_cache=v_cache)
        sinks = check_sinks(s_aux, q.shape[2], q)
        out, lse = _own_part(q, k_cache, v_cache, options | {"num_splits": num_splits, "dispatcher": dispatcher})
    except UsageError as error:
        agree(ranks, {}, error)
        raise
    sizes = {"q": list(q.shape), "heads": k_cache.shape[2], "head_dim_v": v_cache.shape[3], "s_aux": sinks is not None}
    numbers = {"dtype": str(q.dtype), "device": q.device.type, "scale": scale, "softcap": softcap}
    agree(ranks, sizes | numbers, device=q.device)
    for each in ranks.groups:
        out, lse = _merge_ranks(out, lse, each)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    out = out.transpose(1, 2).to(q.dtype)
    return (out, lse) if return_lse else out


def _own_part(q: Tensor, k_cache: Tensor, v_cache: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the output [batch, num_heads, seqlen_q, head_dim_v] and the log-sum-exp in float32 over this rank's
    rows."""
    if k_cache.shape[1] == 0:
        batch, seqlen_q, heads, _ = q.shape
        out = torch.zeros(batch, heads, seqlen_q, v_cache.shape[3], dtype=torch.float32, device=q.device)
        return out, out.new_full(out.shape[:3], -torch.inf)
    found, lse = flash_attn_with_kvcache(q, k_cache, v_cache, **options, return_softmax_lse=True)
    return found.transpose(1, 2), lse.float()


def _merge_ranks(out: Tensor, lse: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp in float32 over the rows of all ranks of a group.

    Raises:
        RankError: a rank took no part.
    """
    own = torch.cat([out, lse.unsqueeze(-1)], -1)  # float32 as the log-sum-exp is
    return merge_gathered(_gather_partials(own, group) if own.is_cuda else _exchange_partials(own, group))


def _gather_partials(own: Tensor, group: ProcessGroup) -> Tensor:
    """Return the partial results [ranks, ...] of all ranks, by one launch on the GPU, which the host does not
    wait for unless TORCH_NCCL_BLOCKING_WAIT=1 is set."""
    together = own.new_empty(dist.get_world_size(group), *own.shape)
    try:
        _gather(together.view(-1), own.view(-1), group=group)
    except RuntimeError as error:
        raise RankError(
            f"All ranks of a group must make the same call, but rank {dist.get_rank()} could not gather their partial "
            f"results: {str(error).splitlines()[0]}. {_missing(group)} ended or called something else: its own error "
            "says why."
        ) from error
    return together


def _missing(group: ProcessGroup) -> str:
    """Return which ranks of a group do not answer, as the subject of a sentence."""
    silent = silent_ranks(group)
    return f"Rank {', '.join(map(str, silent))}, which does not answer," if silent else "Another rank"


def _exchange_partials(own: Tensor, group: ProcessGroup) -> Tensor:
    """Return the partial results [ranks, ...] of all ranks, by a message to each: where one is missing, the error names
    it, which that of a gather cannot."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    together = own.expand(size, *own.shape).contiguous()
    others = [number for number in range(size) if number != rank]
    sent, received = [(peer, own) for peer in others], [(peer, together[peer]) for peer in others]
    Messages(group, sent, received, "partial results").wait()
    return together

"""FlashAttention-2's functions, in its argument order and with its meaning: [batch, seqlen, heads, dim], packed tokens
[tokens, heads, dim], causal from the lower right. Differentiable."""

from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import UNLIMITED
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.api.cache.paged_sequences import (
    as_sequences,
    check_pages,
    lengths_of,
    over_pages,
    reads_pages,
)
from blocktune.runtime.api.flash_arguments import length_of, real_number, sides, window_of, with_dense_rows
from blocktune.runtime.dispatch.call_checks import (
    check_dimensions,
    check_dropout,
    check_sinks,
    check_sizes,
    check_slopes,
    check_softcap,
)
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention
from blocktune.runtime.dispatch.engine import NotServedError
from blocktune.runtime.dispatch.launches.dtensors import refuse_distributed
from blocktune.runtime.dispatch.launches.layout import Layout
from blocktune.runtime.dispatch.obstacles import is_symbolic
from blocktune.runtime.dispatch.sdpa_arguments import scale_of

UNBOUNDED = (UNLIMITED, UNLIMITED)
"""No window."""

Attended: TypeAlias = Tensor | tuple[Tensor, Tensor | None, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    dispatcher: Dispatcher = attention,
) -> Attended:
    """Compute attention of q [batch, seqlen_q, num_heads, head_dim] over k and v [batch, seqlen_k, num_heads_kv,
    head_dim(_v)].

    causal lets query i see the keys up to i + seqlen_k - seqlen_q; window_size (left, right) is around that diagonal,
    -1 for no bound; alibi_slopes float32 [num_heads] or [batch, num_heads], times the distance to it. softmax_scale is
    1 / sqrt(head_dim) unless given; softcap 0 means no softcap. deterministic makes the gradients deterministic, as
    torch.use_deterministic_algorithms does. A query that sees no key gives zeros. s_aux [num_heads]: attention sinks, a
    logit of every head that joins the softmax of its rows and has no value; differentiable. dispatcher: whose configs
    serve the call.

    Returns:
        the output [batch, seqlen_q, num_heads, head_dim_v]; with return_attn_probs (output, log-sum-exp float32
        [batch, num_heads, seqlen_q], None): probabilities are never in memory. Both are differentiable.

    Raises:
        UsageError: tensors do not fit each other, or an argument is out of range. It is a RuntimeError, as
            flash-attention's is.
        TooFewDimensionsError: q, k or v has fewer than four dimensions. It is an IndexError as well.
        WrongTypeError: an argument is no tensor or no number. It is a TypeError as well.
    """
    numbers = dropout_p, softmax_scale, causal, sides(window_size), softcap, deterministic, return_attn_probs
    way, tensors = ("flash_attn_func", *numbers), (q, k, v, alibi_slopes, s_aux)
    bound = None if is_compiling() else dispatcher.resolver.fast_path.find(way, tensors)
    if bound is not None:
        out, lse = bound(q, k, v, *_rows(alibi_slopes), *_sink_arguments(s_aux))
        return (out, lse, None) if return_attn_probs else out
    check_dimensions("[batch, seqlen, heads, dim]", q=q, k=k, v=v)
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    check_sizes(query, key, value, names="q, k and v")
    asked = _call_options(
        query, query.shape[0], dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux
    )
    plain = not (return_attn_probs or dropout_p or softcap or deterministic) and alibi_slopes is None and s_aux is None
    if plain and asked["window"] == UNBOUNDED and (not causal or query.shape[2] == key.shape[2]):
        options = {
            "is_causal": bool(causal),
            "scale": asked["scale"],
            "enable_gqa": bool(query.shape[1] != key.shape[1]),
        }
        if is_symbolic(q):
            return dispatcher(query, key, value, **options).transpose(1, 2)
        return dispatcher.rows(way, q, k, v, **options)
    out, lse = dispatcher.attend(
        query,
        key,
        value,
        lse=return_attn_probs,
        deterministic=_is_deterministic(deterministic),
        layout=Layout.LENGTH_FIRST,
        remember=lambda fast_path, bound: fast_path.add(way, tensors, bound),
        **asked,
    )
    out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    dispatcher: Dispatcher = attention,
) -> Attended:
    """Return `flash_attn_func` of packed sequences: q [tokens_q, num_heads, head_dim], k and v [tokens_k, num_heads_kv,
    head_dim(_v)], or with block_table (int32 [sequences, max_pages]) pages [pages, page_size, num_heads_kv,
    head_dim(_v)], which hold the keys of a sequence one page after the other.

    Sequence number n is the tokens cu_seqlens[n] to cu_seqlens[n + 1] (int32 [sequences + 1], beginning with 0), and
    max_seqlen the length of the longest. Tokens after the last sequence give zeros. What stands in cu_seqlens is
    checked on the CPU, and on a GPU at the first call of a kind: later calls do not wait for it. s_aux [num_heads]:
    attention sinks, as in `flash_attn_func`. dispatcher: whose configs serve the call.

    Returns:
        the output [tokens_q, num_heads, head_dim_v]; with return_attn_probs (output, log-sum-exp float32 [num_heads,
        tokens_q], None), both differentiable.

    Raises:
        UsageError: tensors do not fit each other, an argument is out of range, a table names a page that is not there,
            or cu_seqlens do not ascend from 0 to no more than the tokens. It is a RuntimeError, as in flash-attention.
        TooFewDimensionsError: q, k or v has fewer than three dimensions. It is an IndexError as well.
        WrongTypeError: an argument is no tensor or no number. It is a TypeError as well.
    """
    numbers = dropout_p, softmax_scale, causal, sides(window_size), softcap, deterministic, return_attn_probs
    shared = cu_seqlens_k is cu_seqlens_q  # as in self-attention; guards take no tensor twice
    way = ("flash_attn_varlen_func", max_seqlen_q, max_seqlen_k, shared, *numbers)
    tensors = (q, k, v, alibi_slopes, cu_seqlens_q, None if shared else cu_seqlens_k, s_aux)
    bound = None if is_compiling() or block_table is not None else dispatcher.find_call(way, *tensors)
    if bound is not None:
        out, lse = bound(q, k, v, *_rows(alibi_slopes), cu_seqlens_q, cu_seqlens_k, *_sink_arguments(s_aux))
        return (out, lse, None) if return_attn_probs else out
    check_dimensions("[tokens, heads, dim]", q=q)
    query = q.transpose(0, 1)[None]
    batch = count_sequences(query, cu_seqlens_q, cu_seqlens_k)
    asked = _call_options(query, batch, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    asked["deterministic"] = _is_deterministic(deterministic)
    asked["remember"] = lambda fast_path, bound: fast_path.add(way, tensors, bound)
    longest = length_of("max_seqlen_q", max_seqlen_q), length_of("max_seqlen_k", max_seqlen_k)
    bounds = cu_seqlens_q, cu_seqlens_k
    out, lse = attend_packed(
        q, k, v, bounds, longest, asked, lse=return_attn_probs, table=block_table, dispatcher=dispatcher
    )
    return (out, lse, None) if return_attn_probs else out


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    asked: dict[str, Any],
    *,
    lse: bool,
    table: Tensor | None,
    dispatcher: Dispatcher,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of packed queries [tokens, heads, dim] over packed keys, or over those of a block table's
    pages.

    Args:
        bounds: where sequences of queries and of keys begin. longest: the lengths of the longest ones.
        asked: further arguments of `Engine.attend`; calls without a table are added to the fast path.

    Returns:
        the output [tokens, heads, dim_v] and the log-sum-exp [heads, tokens].

    Raises:
        UsageError: the tensors do not fit each other, or bounds or tables are wrong.
    """
    query, batch = q.transpose(0, 1)[None], count_sequences(q, *bounds)
    asked = asked | {"cu_seqlens_q": bounds[0], "cu_seqlens_k": bounds[1]}
    if table is not None:
        refuse_distributed(q, "Packed sequences over pages")
        asked["remember"], table = None, with_dense_rows(table)
        lengths = lengths_of(bounds[1])
        check_pages(query, k, v, table, lengths, dispatcher)
        if reads_pages(query, k, v, longest[0], asked):
            with suppress(NotServedError):  # then the keys are copied
                return over_pages(q, k, v, table, lengths, longest[0], asked, lse=lse, dispatcher=dispatcher)
        k, v = as_sequences(k, v, table, bounds[1], longest[1])
    check_dimensions("[tokens, heads, dim]", k=k, v=v)
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    check_sizes(query, key, value, names="q, k and v")
    asked["lengths"] = batch, *longest
    out, sums = dispatcher.attend(query, key, value, lse=lse, layout=Layout.PACKED, **asked)
    return out[0].transpose(0, 1), sums


def _call_options(
    query: Tensor,
    batch: int,
    dropout_p: float,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> dict[str, Any]:
    """Return the arguments as `Call.of` takes them.

    Raises:
        UsageError: one is out of range.
        WrongTypeError: one is no number.
    """
    dropout_p, softcap = real_number("dropout_p", dropout_p), real_number("softcap", softcap)
    check_dropout(dropout_p)
    check_softcap(softcap)
    return {
        "causal": Causal.LOWER_RIGHT if causal else Causal.NONE,
        "scale": scale_of(query, None if scale is None else real_number("softmax_scale", scale)),
        "dropout_p": dropout_p,
        "window": window_of(window),
        "softcap": softcap,
        "alibi_slopes": check_slopes(slopes, batch, query.shape[1], query),
        "sinks": check_sinks(sinks, query.shape[1], query),
    }


def _rows(slopes: Tensor | None) -> tuple[Tensor, ...]:
    """Return the slopes as `check_slopes` returns them, if there are any."""
    if slopes is None:
        return ()
    return (slopes if slopes.dim() == 2 else slopes.unsqueeze(0),)


def _sink_arguments(sinks: Tensor | None) -> tuple[Tensor, ...]:
    """Return the sinks, if there are any."""
    return () if sinks is None else (sinks,)


def _is_deterministic(asked: bool) -> bool:
    return asked or torch.are_deterministic_algorithms_enabled()


def count_sequences(query: Tensor, bounds_q: Tensor, bounds_k: Tensor) -> int:
    """Return how many sequences there are.

    Raises:
        UsageError: the bounds are no int32 vectors of one length, contiguous and on the query's device.
    """
    check_dimensions("[sequences + 1]", cu_seqlens_q=bounds_q, cu_seqlens_k=bounds_k)
    for name, bounds in (("cu_seqlens_q", bounds_q), ("cu_seqlens_k", bounds_k)):
        if bounds.dtype != torch.int32 or not bounds.is_contiguous():
            raise UsageError(
                f"`{name}` must be int32 [sequences + 1] and contiguous, but got {bounds.dtype} {tuple(bounds.shape)}. "
                "Convert it with .to(torch.int32)."
            )
        if bounds.device != query.device:
            raise UsageError(
                f"`{name}` must be on the device of q, but got {bounds.device} and {query.device}. Move it there."
            )
    if bounds_q.shape != bounds_k.shape or bounds_q.shape[0] < 2:
        raise UsageError(
            "`cu_seqlens_q` and `cu_seqlens_k` must describe the same number of sequences, at least one, but got "
            f"{bounds_q.shape[0]} and {bounds_k.shape[0]} entries. Each needs one entry more than there are sequences."
        )
    count: int = bounds_q.shape[0] - 1  # no int(): it would be the same in every call of an exported graph
    return count

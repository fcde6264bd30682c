"""The fallback for a call that no kernel of ours serves: PyTorch, with the same meaning and differentiable by
autograd."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from blocktune.kernels.portable.sinks.results import with_sinks
from blocktune.kernels.values.features import UNLIMITED, MaskKind
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import Causal, Direction
from blocktune.kernels.values.short_numbers import as_factor
from blocktune.kernels.values.tree_mask import WORD_BITS
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.launches.results import dense_like, with_strides_of
from blocktune.runtime.dispatch.obstacles import is_capturing, is_short_cache, is_symbolic
from blocktune.runtime.dispatch.sdpa_arguments import AUTOCAST_DEVICES, SdpaArguments
from blocktune.runtime.dispatch.torch_attention import prepare_blas, torch_attention


def mathematics(query: Tensor, key: Tensor, value: Tensor, call: Call, *, lse: bool) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of a call; without `lse` the latter may hold anything, and the scores stay out
    of memory where PyTorch has a kernel that keeps them out. Dropped pairs are those of the call's seed, except
    there."""
    device = query.device.type
    if is_capturing(query):
        prepare_blas(query.device)
    with torch.autocast(device, enabled=False) if device in AUTOCAST_DEVICES else nullcontext():
        if not lse and is_sdpa_call(query, key, call):
            given = sdpa_call_arguments(query, key, value, call)
            return torch_attention(given), query.new_zeros(query.shape[:3], dtype=torch.float32)
        out, sums = _attend_dense(query, key, value, call)
        if call.extras.sinks is not None:
            out, sums = with_sinks(out, sums, call.extras.sinks)
        return out, sums.float()


def sdpa_call_arguments(query: Tensor, key: Tensor, value: Tensor, call: Call) -> SdpaArguments:
    """Return the arguments by which PyTorch's attention computes a call that `is_sdpa_call`."""
    causal, shared = call.causal is not Causal.NONE, bool(query.shape[1] != key.shape[1])
    extras = call.extras
    return SdpaArguments(query, key, value, extras.mask, extras.dropout_p, causal, call.scale, shared)


def _attend_dense(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of a call without its sinks, with all scores in memory."""
    if call.features.cached:
        return _attend_cache(query, key, value, call)
    if call.features.varlen and (is_capturing(query) or is_symbolic(query)):
        return _attend_packed(query, key, value, call)
    if call.extras.block_mask is not None:
        seen = call.extras.block_mask.to_dense(query.shape[2], key.shape[2])
        seen = seen.tril() if call.causal is Causal.UPPER_LEFT else seen
        return masked_attention(query, key, value, seen, call.scale)
    return _attend_by_definition(query, key, value, call)


def is_sdpa_call(query: Tensor, key: Tensor, call: Call) -> bool:
    """Return whether scaled_dot_product_attention computes the same: its diagonal, and no other feature than its
    own."""
    if call.extras.sinks is not None:
        return False
    names = call.features_of(Direction.FORWARD).names
    if call.causal is Causal.NONE:
        return names <= {str(MaskKind.BOOLEAN), str(MaskKind.ADDITIVE), "dropout"}
    upper_left = call.causal is Causal.UPPER_LEFT or query.shape[2] == key.shape[2]
    return upper_left and names <= {"dropout"}


def _attend_by_definition(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    out, sums = attention_reference(
        query,
        key,
        value,
        causal=call.causal,
        scale=call.scale,
        dtype=torch.float64 if query.dtype is torch.float64 else torch.float32,
        features=call.features_of(Direction.FORWARD),
        extras=call.extras,
    )
    return out.to(query.dtype), sums


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scale: float,
    *,
    softcap: float = 0.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale * query key^T) value over the keys that are seen, and the natural log-sum-exp, in float32
    inside.

    query [batch, num_heads, seqlen_q, head_dim], key and value [batch, num_heads_kv, seqlen_k, head_dim(_v)], seen a
    boolean tensor broadcastable to [batch, num_heads, seqlen_q, seqlen_k]; what stands in unseen keys, NaN included,
    changes nothing. A row that sees no key gives 0 and -inf. All scores are in memory. softcap: scores go through
    softcap * tanh(score / softcap), unless it is 0. bias: is added to them then, broadcastable likewise.

    Returns:
        the output like query, and the log-sum-exp [batch, num_heads, seqlen_q], in float32 or float64.
    """
    group, wide = query.shape[1] // key.shape[1], torch.promote_types(query.dtype, torch.float32)
    wide_key, wide_value = (tensor.to(wide).repeat_interleave(group, 1) for tensor in (key, value))
    scores = query.to(wide) @ wide_key.mT * scale
    if softcap:  # of what is seen: no gradient of zero undoes the derivative of a NaN
        scores = softcap * (torch.where(seen, scores, 0.0) / softcap).tanh()
    if bias is not None:
        scores = scores + bias
    scores = torch.where(seen, scores, float("-inf"))
    blind = scores.isneginf().all(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0.0)  # the gradient of -inf minus -inf is no number
    lse = torch.logsumexp(scores, -1).masked_fill(blind[..., 0], float("-inf"))
    probabilities = scores.softmax(-1).masked_fill(blind, 0.0)
    anyone = seen.expand(scores.shape).any(-2)  # 0 * NaN is NaN: a value that no query sees counts as 0
    clean = torch.where(anyone[..., None], wide_value, 0.0)
    return (probabilities @ clean).to(query.dtype), lse


def _attend_cache(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp without a look at the lengths, so that a CUDA graph may capture it."""
    extras, wide = call.extras, torch.promote_types(query.dtype, torch.float32)
    if is_short_cache(query, key):
        table = extras.block_table
        key, value = _widen(key, extras.scale_k, table, wide), _widen(value, extras.scale_v, table, wide)
    else:
        key, value = (gather_pages(cache, extras.block_table) for cache in (key, value))
    assert extras.cache_seqlens is not None
    lengths = extras.cache_seqlens.long()[:, None, None]
    rows, lengths_q, count = query, torch.full_like(lengths, query.shape[2]), query.shape[2]
    if extras.cu_seqlens_q is not None:
        assert call.lengths is not None
        bounds = extras.cu_seqlens_q.long()
        rows, lengths_q = _pad(query, bounds, call.lengths[1]), bounds.diff()[:, None, None]
    distance = _distance(rows.shape[2], key.shape[2], lengths - lengths_q, call.causal)
    seen, slopes = _visible(distance, lengths, call), extras.alibi_slopes
    bias = None if slopes is None else -slopes.to(wide)[..., None, None] * distance.abs()[:, None]
    out, lse = masked_attention(rows, key, value, seen[:, None], call.scale, softcap=extras.softcap, bias=bias)
    return (out, lse) if extras.cu_seqlens_q is None else _in_tokens(out, lse, bounds, count)


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of packed sequences without a look at their bounds, so that a graph may hold
    it: each is padded to the longest one."""
    extras, wide = call.extras, torch.promote_types(query.dtype, torch.float32)
    assert call.lengths is not None
    assert extras.cu_seqlens_q is not None
    assert extras.cu_seqlens_k is not None
    bounds_q, bounds_k = extras.cu_seqlens_q.long(), extras.cu_seqlens_k.long()
    _, longest_q, longest_k = call.lengths
    padded = _pad(query, bounds_q, longest_q)
    keys, values = (_pad(tensor, bounds_k, longest_k) for tensor in (key, value))
    lengths_q, lengths_k = (bounds.diff()[:, None, None] for bounds in (bounds_q, bounds_k))
    distance = _distance(padded.shape[2], keys.shape[2], lengths_k - lengths_q, call.causal)
    seen, slopes = _visible(distance, lengths_k, call), extras.alibi_slopes
    bias = None if slopes is None else -slopes.to(wide)[..., None, None] * distance.abs()[:, None]
    seen = seen & (torch.arange(padded.shape[2], device=query.device)[:, None] < lengths_q)
    out, lse = masked_attention(padded, keys, values, seen[:, None], call.scale, softcap=extras.softcap, bias=bias)
    return _in_tokens(out, lse, bounds_q, query.shape[2])


def _pad(tokens: Tensor, bounds: Tensor, longest: int) -> Tensor:
    """Return the sequences [batch, heads, longest, dim] of packed tokens [1, heads, tokens, dim], zeros after each."""
    count = tokens.shape[2]
    rows = torch.arange(min(longest, count), device=tokens.device)
    places = (bounds[:-1, None] + rows).clamp(max=max(count - 1, 0))
    inside = rows < bounds.diff()[:, None]
    return torch.where(inside[None, ..., None], tokens[0][:, places], 0.0).transpose(0, 1)


def _in_tokens(out: Tensor, lse: Tensor, bounds: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the output [1, heads, count, dim] and log-sum-exp [heads, count] of packed tokens, 0 and -inf after the
    last sequence, of those of padded sequences."""
    rows, sums = (_unpad(tensor, bounds, count) for tensor in (out, lse[..., None]))
    inside = (torch.arange(count, device=out.device) < bounds[-1])[:, None]
    return torch.where(inside, rows, 0.0)[None], torch.where(inside, sums, float("-inf"))[..., 0]


def _unpad(sequences: Tensor, bounds: Tensor, count: int) -> Tensor:
    """Return packed tokens [heads, count, dim] of what `_pad` returns; after the last sequence they are any."""
    tokens = torch.arange(count, device=bounds.device)
    own = (tokens[:, None] >= bounds[1:-1]).sum(-1)
    within = (tokens - bounds[own]).clamp(max=max(sequences.shape[2] - 1, 0))
    return sequences[own, :, within].transpose(0, 1)


def gather_pages(cache: Tensor, table: Tensor | None) -> Tensor:
    """Return the cache as [batch, num_heads_kv, rows, dim]: itself, or the pages of every entry one after the other.
    After the last key, where the table may hold anything, any page will do."""
    if table is None:
        return cache
    pages = table.long().clamp(0, max(cache.shape[0] - 1, 0))
    return cache[pages].transpose(1, 2).flatten(2, 3)


def _widen(cache: Tensor, scale: Tensor | None, table: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the numbers that an 8-bit cache stands for, `gathered`."""
    rows = gather_pages(cache.view(torch.int8), table).view(cache.dtype).to(dtype)  # no device indexes all 8-bit types
    if scale is None:
        return rows
    factor = as_factor(scale)
    return rows * (gather_pages(factor, table) if scale.dim() == 3 else factor)


def _distance(seqlen_q: int, seqlen_k: int, more_keys: Tensor, causal: Causal) -> Tensor:
    """Return [batch, seqlen_q, seqlen_k]: how many keys each key comes after the one on the query's diagonal.

    Args:
        more_keys: how many more keys than queries each entry has, [batch, 1, 1].
    """
    keys = torch.arange(seqlen_k, device=more_keys.device)[None, None]
    rows = torch.arange(seqlen_q, device=more_keys.device)[None, :, None]
    return keys - rows - (0 if causal is Causal.UPPER_LEFT else more_keys)


def _visible(distance: Tensor, lengths: Tensor, call: Call) -> Tensor:
    """Return [batch, seqlen_q, seqlen_k], True where the query sees the key."""
    keys = torch.arange(distance.shape[2], device=lengths.device)[None, None]
    seen = (keys < lengths).expand(-1, distance.shape[1], -1)
    left, right = call.features.window or (UNLIMITED, UNLIMITED)
    if call.causal is not Causal.NONE:
        seen = seen & (distance <= 0)
    elif right != UNLIMITED:
        seen = seen & (distance <= right)
    if left != UNLIMITED:
        seen = seen & (distance >= -left)
    tree = call.extras.tree_mask
    return seen if tree is None else seen & _in_tree(tree, keys, lengths, distance.shape[1])


def _in_tree(tree: Tensor, keys: Tensor, lengths: Tensor, seqlen_q: int) -> Tensor:
    """Return True for keys before the drafts, and for the drafts whose bit is set."""
    drafts = keys - (lengths - seqlen_q)
    inside = drafts.clamp(0, seqlen_q - 1).expand(-1, seqlen_q, -1)
    words = tree.long().gather(2, inside // WORD_BITS)
    return (drafts < 0) | ((words >> inside % WORD_BITS & 1) != 0)


def mathematics_gradients(
    query: Tensor, key: Tensor, value: Tensor, call: Call, grad: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `mathematics` by autograd, laid out as `new_gradients` are. grad_lse: the gradient of the
    log-sum-exp, None for 0."""
    q, k, v = leaves = tuple(tensor.detach().requires_grad_() for tensor in (query, key, value))
    found = _differentiate(leaves, q, k, v, call, grad, grad_lse)
    dq, dk, dv = (with_strides_of(one, dense_like(leaf)) for leaf, one in zip(leaves, found, strict=True))
    return dq, dk, dv


def mathematics_gradient_of_bias(
    query: Tensor, key: Tensor, value: Tensor, call: Call, grad: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """Return the gradient of the additive mask of `mathematics`, contiguous. grad_lse: None for 0."""
    assert call.extras.mask is not None
    mask = call.extras.mask.detach().requires_grad_()
    call = replace(call, extras=replace(call.extras, mask=mask))
    (found,) = _differentiate((mask,), query, key, value, call, grad, grad_lse)
    return found.contiguous()


def _differentiate(
    leaves: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    grad: Tensor,
    grad_lse: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of leaves that `mathematics` reads."""
    with torch.enable_grad(), autograd_within_an_op():
        wants_lse = call.features.dropout or grad_lse is not None
        again = mathematics(query, key, value, call, lse=wants_lse)
        outputs, grads = (again[:1], (grad,)) if grad_lse is None else (again, (grad, grad_lse))
        found: tuple[Tensor, ...] = torch.autograd.grad(outputs, leaves, grads)
        return found


@contextmanager
def autograd_within_an_op() -> Iterator[None]:
    """Let autograd record here, even where a dispatch mode (a profiler, a checker) has called the op: it runs below
    autograd then."""
    keys = [torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView]
    excluded = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in keys]
    try:
        for key in keys:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield
    finally:
        for key, before in zip(keys, excluded, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, before)

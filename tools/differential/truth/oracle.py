"""Attention by its definition, in float64 for the truth and in the type of the tensors for what PyTorch makes of it.

softmax(scale * q k^T) v over the keys that a query sees, and zeros where it sees none. Nothing of the product is used.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

NOTHING = float("-inf")
ABSORBING = -1e30
"""A bias below it leaves nothing of what it is added to: a row that has no other gives its keys one weight, exactly."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be computed: query [batch, heads, rows, columns], key and value with heads_kv of them.

    seen: bool, broadcastable to the scores, or None; bias is added to the scaled scores, in float64. sinks: [heads], a
    logit that joins the softmax of every row of a head. slopes, mask: what the bias was made of. These and sinks may
    require gradients.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    seen: Tensor | None = None
    bias: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    mask: Tensor | None = None

    @property
    def wanted(self) -> list[Tensor]:
        """Mask, slopes and sinks, of which a gradient is wanted."""
        given = self.mask, self.slopes, self.sinks
        return [each for each in given if each is not None and each.requires_grad]

    def to(self, dtype: torch.dtype) -> "Problem":
        """The same in another type, of new tensors."""
        query, key, value = (tensor.detach() for tensor in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value).wide(dtype)

    def wide(self, dtype: torch.dtype) -> "Problem":
        """The same in another type, differentiable."""
        bias = None if self.bias is None else self.bias.to(dtype)
        query, key, value = (tensor.to(dtype) for tensor in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value, bias=bias)


@dataclass(frozen=True, slots=True)
class Truth:
    """Output and gradients in float64, each with the sum of the magnitudes of the terms that make each element.

    score_size: the largest magnitude of a term in the scores of each row, [batch, heads, rows, 1].
    """

    tensors: tuple[Tensor, ...]
    magnitudes: tuple[Tensor, ...]
    score_size: Tensor


def attention(problem: Problem) -> Tensor:
    """The output, in the type of the problem's tensors, differentiable. What a query does not see has no part in it, be
    it a number or not; no more has a key whose score is -inf because it is infinite."""
    weights, value = _weights(problem), _repeat_heads(problem.value, problem)
    bad = ~torch.isfinite(value)
    if not bool(bad.any()):
        return weights @ value
    out = weights @ torch.where(bad, 0.0, value)
    met = (_scores(problem).detach() != NOTHING).to(weights.dtype) @ bad.to(weights.dtype)
    return torch.where(met > 0, float("nan"), out)


def plain_attention(problem: Problem) -> Tensor:
    """The output as PyTorch's mathematics have it: hidden pairs get -inf added, and count with a weight of 0. A hidden
    number that is none makes the result none."""
    seen = problem.seen
    hidden = None if seen is None else torch.where(seen, 0.0, NOTHING).to(problem.query.dtype)
    bias = hidden if problem.bias is None else problem.bias if hidden is None else problem.bias + hidden
    return _weights(replace(problem, seen=None, bias=bias)) @ _repeat_heads(problem.value, problem)


def truth_of(problem: Problem, grad: Tensor | None) -> Truth:
    """The output, and with `grad` the gradients of query, key, value, mask, slopes and sinks that need one."""
    exact = problem.to(torch.float64)
    leaves = tuple(tensor.requires_grad_(grad is not None) for tensor in (exact.query, exact.key, exact.value))
    exact = replace(exact, query=leaves[0], key=leaves[1], value=leaves[2])
    out = attention(exact)
    gradients: tuple[Tensor, ...] = ()
    if grad is not None:
        options = {"materialize_grads": True, "retain_graph": bool(exact.wanted)}
        gradients = torch.autograd.grad(out, (*leaves, *exact.wanted), grad.double(), **options)
    with torch.no_grad():
        finite = _finite(exact)
        magnitudes = _magnitudes(finite, _weights(exact).nan_to_num(0.0), None if grad is None else grad.double())
        return Truth((out.detach(), *gradients), magnitudes, _score_size(finite) + _capped_size(exact))


def _finite(problem: Problem) -> Problem:
    """The problem with 0 for what is not finite."""
    tensors = (torch.where(one.isfinite(), one, 0.0) for one in (problem.query, problem.key, problem.value))
    query, key, value = tensors
    return replace(problem, query=query, key=key, value=value)


def log_sum_exp(problem: Problem) -> Tensor:
    """The logarithm of the sum of a row's exponentials, float32 [batch, heads, rows]; -inf for rows that see none."""
    scores = _scores(problem.wide(torch.float32))
    empty = (scores == NOTHING).all(-1)
    return torch.logsumexp(scores.masked_fill(empty[..., None], 0.0), -1).masked_fill(empty, NOTHING)


def _scores(problem: Problem) -> Tensor:
    """The scores of all pairs, -inf for those that are hidden."""
    key = _repeat_heads(problem.key, problem)
    scores = problem.query @ key.mT * problem.scale
    if problem.softcap:
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))  # 16 bits would leave nothing of a large cap
        scores = (problem.softcap * torch.tanh(wide / problem.softcap)).to(scores.dtype)
    if problem.bias is not None:
        scores = scores + problem.bias
    return scores if problem.seen is None else torch.where(problem.seen, scores, NOTHING)


def _weights(problem: Problem) -> Tensor:
    """The probabilities of the keys; rows that see none are zero."""
    scores = _scores(problem)
    if not scores.shape[-1]:
        return scores
    highest = scores.detach().amax(-1, keepdim=True)
    sinks = None if problem.sinks is None else problem.sinks.to(scores.dtype)[None, :, None, None]
    highest = highest if sinks is None else torch.maximum(highest, sinks.detach())
    highest = torch.where(highest == NOTHING, 0.0, highest)
    raised = torch.exp(scores - highest)
    total = raised.sum(-1, keepdim=True)
    total = total if sinks is None else total + torch.exp(sinks - highest)
    return raised / torch.where(total == 0, 1.0, total)


def _repeat_heads(tensor: Tensor, problem: Problem) -> Tensor:
    """Keys or values with a head for every head of the query."""
    group = problem.query.shape[1] // max(1, tensor.shape[1])
    return tensor.repeat_interleave(group, 1) if group > 1 else tensor


def _score_size(problem: Problem) -> Tensor:
    """A bound of the terms in a row's scores: |query| times the longest |key|, and the largest finite bias."""
    if not problem.key.numel() or not problem.query.numel():
        return problem.query.new_zeros(*problem.query.shape[:3], 1)
    longest = _repeat_heads(problem.key, problem).norm(dim=-1).amax(-1)[..., None, None]
    size = problem.query.norm(dim=-1, keepdim=True) * longest * abs(problem.scale)
    if problem.bias is not None and problem.bias.numel():
        counts = problem.bias.isfinite() & (problem.bias > ABSORBING)
        size = size + torch.where(counts, problem.bias, 0.0).abs().max()
    return size


def _capped_size(problem: Problem) -> float:
    """What a soft cap makes of infinite scores."""
    is_finite = bool(problem.query.isfinite().all() and problem.key.isfinite().all())
    return 0.0 if is_finite else problem.softcap


def _magnitudes(problem: Problem, weights: Tensor, grad: Tensor | None) -> tuple[Tensor, ...]:
    """The sums that make output and gradients, of magnitudes: what rounding of the terms can change.

    problem: finite. weights: of the problem as it was given, in which an infinite key may leave all weight to others.
    """
    value, key = (_repeat_heads(tensor, problem).abs() for tensor in (problem.value, problem.key))
    out = weights @ value
    if grad is None:
        return (out,)
    upstream = grad.abs()
    inner = upstream @ value.mT
    by_row = (weights * inner).sum(-1, keepdim=True)
    by_score = weights * (inner + by_row)
    inner = by_score * abs(problem.scale)
    return (
        out,
        inner @ key,
        _fold_groups(inner.mT @ problem.query.abs(), problem.key),
        _fold_groups(weights.mT @ upstream, problem.value),
        *_of_features(problem, by_score, (1.0 - weights.sum(-1, keepdim=True)).clamp(min=0.0) * by_row),
    )


def _of_features(problem: Problem, by_score: Tensor, by_sink: Tensor) -> list[Tensor]:
    """Those of what is wanted. by_score, by_sink: those of a bias [batch, heads, rows, keys], and of a row's sink."""
    found = []
    for leaf in problem.wanted:
        if leaf is problem.sinks:
            found.append(by_sink.sum((0, 2, 3)))
            continue
        with torch.enable_grad():
            assert problem.bias is not None
            sums = torch.autograd.grad(problem.bias, leaf, by_score.sum_to_size(problem.bias.shape))
        found.append(sums[0].abs())
    return found


def _fold_groups(tensor: Tensor, like: Tensor) -> Tensor:
    """Of every group of query heads the sum."""
    if tensor.shape[1] == like.shape[1]:
        return tensor
    return tensor.unflatten(1, (like.shape[1], -1)).sum(2)

"""PyTorch's FlexAttention as a contender: compiled for the very shape, its own autotuning at its widest.

    compute = flex_compute(shape, question)

Masks become a `BlockMask`, whose empty blocks it skips; soft cap, ALiBi and additive masks a function of the score.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.features import UNLIMITED, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.compare.peers import Compute, for_question
from blocktune.tuner.correctness.checks_of_shape import AnyQuestion
from blocktune.tuner.correctness.forward import softmax_scale

KNOWN_FEATURES = frozenset({"window", "softcap", "alibi", "boolean", "additive", "block_sparse", "deterministic"})
"""The features that its functions can say, or that ask nothing of who is only compared."""

COMPILE_MODE = "max-autotune-no-cudagraphs"
"""All configs that it has are timed.

A captured graph would hide the host's cost, but that is in no contender's time here."""

Visible = Callable[[Any, Any, Any, Any], Any]


def flex_compute(shape: AttentionShape, question: AnyQuestion) -> Compute:
    """Return FlexAttention for this question: a forward, or a backward whose forward ran before.

    Raises:
        UsageError: it does not compute what the shape asks for.
    """
    unknown = sorted(shape.features.names - KNOWN_FEATURES)
    if unknown:
        raise UsageError(f"FlexAttention is compared without {', '.join(unknown)}. Compare a shape without them.")
    inputs = getattr(question, "inputs", None)
    attend = _compile_flex(shape, inputs.extras if inputs is not None else NO_EXTRAS, question.q.device)
    return for_question(attend, question)


def _compile_flex(shape: AttentionShape, extras: Extras, device: torch.device) -> Compute:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seen = _visible(shape, extras)
    block_mask = None
    if seen is not None:
        batch, heads = _masks(extras)
        block_mask = create_block_mask(seen, batch, heads, shape.seqlen_q, shape.seqlen_k, device=device)
    torch.compiler.reset()  # PyTorch compiles a function for a handful of shapes, and a bench may have more
    return functools.partial(
        torch.compile(flex_attention, mode=COMPILE_MODE, dynamic=False, fullgraph=True),
        score_mod=_score_function(shape, extras),
        block_mask=block_mask,
        scale=softmax_scale(shape),
        enable_gqa=shape.group_size > 1,
    )


def _masks(extras: Extras) -> tuple[int, int]:
    """Return how many masks there are, over the batch and over the heads: what all share is laid out and read once."""
    mask = extras.mask if extras.block_mask is None else extras.block_mask.mask
    return (1, 1) if mask is None else (mask.size(0), mask.size(1))


def _visible(shape: AttentionShape, extras: Extras) -> Visible | None:
    """Return which pairs take part, as a function of (batch, head, query, key); None if all do."""
    rules: list[Visible] = []
    diagonal = shape.diagonal
    left, right = shape.features.window or (UNLIMITED, UNLIMITED)
    if shape.causal is not Causal.NONE:
        rules.append(lambda b, h, query, key: key <= query + diagonal)
    if left != UNLIMITED:
        rules.append(lambda b, h, query, key: key >= query + diagonal - left)
    if right != UNLIMITED:
        rules.append(lambda b, h, query, key: key <= query + diagonal + right)
    if shape.features.mask is MaskKind.BOOLEAN:
        mask = _expand_mask(extras.mask, shape)
        rules.append(lambda b, h, query, key: mask[b, h, query, key])
    if shape.features.mask is MaskKind.BLOCK_SPARSE:
        blocks, block_q, block_k = extras.block_mask.mask, extras.block_mask.block_q, extras.block_mask.block_k
        blocks = blocks.expand(shape.batch, shape.num_heads, -1, -1)
        rules.append(lambda b, h, query, key: blocks[b, h, query // block_q, key // block_k])
    return functools.reduce(_both, rules) if rules else None


def _both(one: Visible, other: Visible) -> Visible:
    return lambda b, h, query, key: one(b, h, query, key) & other(b, h, query, key)


def _score_function(shape: AttentionShape, extras: Extras) -> Callable[..., Any] | None:
    """Return what the features do to a scaled score; None if nothing."""
    features, diagonal, softcap = shape.features, shape.diagonal, extras.softcap
    if not (features.softcap or features.alibi or features.mask is MaskKind.ADDITIVE):
        return None
    slopes = None
    if extras.alibi_slopes is not None:
        slopes = extras.alibi_slopes.expand(shape.batch, shape.num_heads)
    bias = _expand_mask(extras.mask, shape) if features.mask is MaskKind.ADDITIVE else None

    def score(value: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        if features.softcap:
            value = softcap * torch.tanh(value / softcap)
        if slopes is not None:
            value = value - slopes[batch, head] * (query + diagonal - key).abs()
        return value if bias is None else value + bias[batch, head, query, key]

    return score


def _expand_mask(mask: Tensor | None, shape: AttentionShape) -> Tensor:
    assert mask is not None
    return mask.expand(shape.batch, shape.num_heads, shape.seqlen_q, shape.seqlen_k)

"""Standard attention as everybody writes it first: the baseline that keeps all scores in memory."""

import functools
from typing import Any

import torch

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.reference import visible
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.compare.peers import Compute, for_question
from blocktune.tuner.correctness.checks_of_shape import AnyQuestion
from blocktune.tuner.correctness.forward import softmax_scale
from blocktune.tuner.traffic.model import standard_memory_problem


def standard_compute(shape: AttentionShape, device: DeviceSpec, question: AnyQuestion) -> Compute:
    """Return compute(q, k, v) of a question, by `standard_attention`; of a backward by autograd, which keeps the
    probabilities.

    Raises:
        UsageError: the scores do not fit the device, or the shape has features.
    """
    if shape.features:
        raise UsageError(f"Standard attention has no features here, but got {shape.label}. Leave it out.")
    problem = standard_memory_problem(shape, device)
    if problem is not None:
        raise UsageError(problem)
    return for_question(functools.partial(standard_attention, shape), question)


def standard_attention(shape: AttentionShape, q: Any, k: Any, v: Any) -> Any:
    """Compute softmax(scale * q k^T) v as three operations with all scores in memory, in the inputs' data type but for
    the softmax, which is in float32. A query without keys gives 0.

    Raises:
        torch.OutOfMemoryError: the scores do not fit.
    """
    k, v = (tensor.repeat_interleave(shape.group_size, dim=1) for tensor in (k, v))
    scores = (q * softmax_scale(shape)) @ k.transpose(-1, -2)
    if shape.causal is not Causal.NONE:
        # the least number instead of -inf: a row without keys would have no softmax, and its gradient would be NaN
        hidden = ~visible(shape.seqlen_q, shape.seqlen_k, shape.causal, q.device)
        scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
    probabilities = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    out = probabilities @ v
    if shape.causal is not Causal.NONE:
        out[:, :, : max(0, -shape.causal_offset)] = 0.0
    return out

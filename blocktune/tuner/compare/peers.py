"""Contenders that compute the same attention: our kernels bound to a config, PyTorch's back ends, and the three
operations that everybody writes first."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel

from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.reference import visible
from blocktune.kernels.values.shape import FP8, AttentionShape, Causal
from blocktune.tuner.correctness.backward import GradientQuestion
from blocktune.tuner.correctness.checks_of_shape import AnyQuestion
from blocktune.tuner.correctness.forward import softmax_scale
from blocktune.tuner.traffic.model import standard_memory_problem

Compute = Callable[[Any, Any, Any], Any]
"""compute(q, k, v): enqueue attention on the current stream and return the output; of a backward (dq, dk, dv)."""

BACKENDS = {"cudnn": "CUDNN_ATTENTION", "fa2": "FLASH_ATTENTION"}
"""PyTorch's back ends by the name that they have here; fa2 is FlashAttention-2."""

ALL_BACKENDS = BACKENDS | {"efficient": "EFFICIENT_ATTENTION"}
"""With the one that serves GPUs which FlashAttention-2 does not."""

KNOWN_FEATURES = frozenset({"boolean", "additive", "deterministic"})
"""The features that scaled_dot_product_attention computes, or that ask nothing of who is only compared."""


def thunk_compute(launch: Launch, question: AnyQuestion, result: Any) -> Compute:
    """Return a bound config with the arguments that the question has for it, written into `result`."""
    run = question.thunk(launch, result)

    def compute(q: Any, k: Any, v: Any) -> Any:
        run()
        return result

    return compute


def sdpa_gradients(shape: AttentionShape, backend: str, question: GradientQuestion) -> Compute:
    """Return the backward of PyTorch's scaled_dot_product_attention held to one back end; its forward ran before.

    Raises:
        UsageError: it does not compute what the shape asks for.
    """
    return for_question(sdpa_forward(shape, backend, question.inputs.extras), question)


def own_compute(launch: Launch, shape: AttentionShape, out: Any) -> Compute:
    """Return a bound config that writes into `out`, as the dispatcher launches it: without the log-sum-exp."""
    scale = softmax_scale(shape)

    def compute(q: Any, k: Any, v: Any) -> Any:
        launch(q, k, v, out, None, scale)
        return out

    return compute


def sdpa_compute(shape: AttentionShape, backend: str, extras: Extras = NO_EXTRAS) -> Compute:
    """Return PyTorch's scaled_dot_product_attention held to one back end, a member of `SDPBackend`.

    Raises:
        UsageError: it does not compute what the shape asks for.
    """
    return without_gradients(sdpa_forward(shape, backend, extras))


def without_gradients(attend: Compute) -> Compute:
    """Return the same computation with gradient mode off."""

    def compute(q: Any, k: Any, v: Any) -> Any:
        with torch.no_grad():
            return attend(q, k, v)

    return compute


def for_question(attend: Compute, question: AnyQuestion) -> Compute:
    """Return what a question asks for of a function that autograd knows: the forward, or the backward of one that ran
    before."""
    if not isinstance(question, GradientQuestion):
        return without_gradients(attend)
    leaves = [tensor.detach().requires_grad_() for tensor in (question.q, question.k, question.v)]
    with torch.enable_grad():
        out = attend(*leaves)

    def backward(q: Any, k: Any, v: Any) -> Any:
        return torch.autograd.grad(out, leaves, question.dout, retain_graph=True)

    return backward


def sdpa_forward(shape: AttentionShape, backend: str, extras: Extras = NO_EXTRAS) -> Compute:
    """Compute the same with whatever gradient mode is on.

    Raises:
        UsageError: it does not compute what the shape asks for.
    """
    problem = sdpa_problem(shape)
    if problem is not None:
        raise UsageError(problem)
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        attn_mask=extras.mask,
        is_causal=shape.causal is not Causal.NONE,
        scale=softmax_scale(shape),
        enable_gqa=shape.group_size > 1,
    )
    chosen = getattr(SDPBackend, backend)

    def compute(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(chosen):
            return attend(q, k, v)

    return compute


def sdpa_problem(shape: AttentionShape) -> str | None:
    """Return why scaled_dot_product_attention cannot be compared for this shape, whatever its back end; or None."""
    provider = current_flash_attention_impl()
    if provider is not None:
        return (
            f"scaled_dot_product_attention calls the kernels of {provider} in this process. Compare in one where no "
            "provider is active: unset BLOCKTUNE_SDPA, or call torch.nn.attention.restore_flash_attention_impl()."
        )
    if shape.dtype == FP8:
        return "scaled_dot_product_attention takes no 8-bit tensors. Compare another data type."
    unknown = sorted(shape.features.names - KNOWN_FEATURES)
    if unknown == ["dropout"]:
        return (
            "`dropout_p` of scaled_dot_product_attention draws other random numbers, so that no result can be checked."
        )
    if unknown:
        return f"scaled_dot_product_attention has no {', '.join(unknown)}. Compare a shape without."
    if shape.features.mask is not MaskKind.NONE and shape.causal is not Causal.NONE:
        return "scaled_dot_product_attention takes `attn_mask` or `is_causal`, not both. Compare one of them."
    if shape.causal is Causal.LOWER_RIGHT and shape.causal_offset:
        return (
            "`is_causal` of scaled_dot_product_attention aligns the mask to the upper left, but the shape is "
            f"{shape.label}. Compare equal lengths."
        )
    return None


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

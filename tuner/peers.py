"""Who computes the same attention: our kernels bound to a config, and PyTorch's back ends."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from blocktune.kernels.errors import UsageError
from blocktune.kernels.kernel import Launch
from blocktune.kernels.shape import AttentionShape, Causal
from blocktune.tuner.check import softmax_scale
from blocktune.tuner.gradients import GradientQuestion

Compute = Callable[[Any, Any, Any], Any]
"""compute(q, k, v): enqueue attention on the current stream and return the output; of a backward (dq, dk, dv)."""

PEERS = {"cudnn": "CUDNN_ATTENTION", "fa2": "FLASH_ATTENTION"}
"""PyTorch's back ends by the name that they have here; fa2 is FlashAttention-2."""


def own_gradients(launch: Launch, question: GradientQuestion, result: Any) -> Compute:
    """A bound backward config that writes into `result`, (dq, dk, dv)."""
    run = question.thunk(launch, result)

    def compute(q: Any, k: Any, v: Any) -> Any:
        run()
        return result

    return compute


def sdpa_gradients(shape: AttentionShape, backend: str, question: GradientQuestion) -> Compute:
    """The backward of PyTorch's scaled_dot_product_attention held to one back end; its forward ran before.

    Raises:
        UsageError: its causal mask is another one than the shape's.
    """
    inputs = [tensor.detach().requires_grad_() for tensor in (question.q, question.k, question.v)]
    with torch.enable_grad():
        out = sdpa_forward(shape, backend)(*inputs)

    def compute(q: Any, k: Any, v: Any) -> Any:
        return torch.autograd.grad(out, inputs, question.dout, retain_graph=True)

    return compute


def own_compute(launch: Launch, shape: AttentionShape, out: Any) -> Compute:
    """A bound config that writes into `out`, as the dispatcher launches it: without the log-sum-exp."""
    scale = softmax_scale(shape)

    def compute(q: Any, k: Any, v: Any) -> Any:
        launch(q, k, v, out, None, scale)
        return out

    return compute


def sdpa_compute(shape: AttentionShape, backend: str) -> Compute:
    """PyTorch's scaled_dot_product_attention held to one back end, a member of `SDPBackend`.

    Raises:
        UsageError: its causal mask is another one than the shape's.
    """
    forward = sdpa_forward(shape, backend)

    def compute(q: Any, k: Any, v: Any) -> Any:
        with torch.no_grad():
            return forward(q, k, v)

    return compute


def sdpa_forward(shape: AttentionShape, backend: str) -> Compute:
    """The same with whatever gradient mode is on.

    Raises:
        UsageError: its causal mask is another one than the shape's.
    """
    if shape.causal is Causal.LOWER_RIGHT and shape.causal_offset:
        raise UsageError(
            "`is_causal` of scaled_dot_product_attention aligns the mask to the upper left, but the shape is "
            f"{shape.label}. Compare equal lengths."
        )
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        is_causal=shape.causal is not Causal.NONE,
        scale=softmax_scale(shape),
        enable_gqa=shape.group_size > 1,
    )
    chosen = getattr(SDPBackend, backend)

    def compute(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(chosen):
            return attend(q, k, v)

    return compute

"""FlashAttention-4 (the CuTe kernels of the `flash-attn` project) as a contender, where it is installed."""

import importlib
from typing import Any

import torch

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.compare.peers import Compute
from blocktune.tuner.correctness.backward import GradientQuestion
from blocktune.tuner.correctness.checks_of_shape import AnyQuestion
from blocktune.tuner.correctness.forward import softmax_scale

MODULE = "flash_attn.cute"


def fa4_compute(shape: AttentionShape, question: AnyQuestion) -> Compute:
    """Return `flash_attn.cute.flash_attn_func` for this question: a plain forward, or a backward whose forward ran
    before.

    It takes [batch, length, heads, dim] and aligns the causal mask to the lower right.

    Raises:
        UsageError: it is not installed, or does not compute what the shape asks for.
    """
    if shape.features or (shape.causal is Causal.UPPER_LEFT and shape.seqlen_q != shape.seqlen_k):
        raise UsageError(f"FlashAttention-4 is compared on plain shapes, but got {shape.label}. Leave features out.")
    try:
        function = importlib.import_module(MODULE).flash_attn_func
    except ImportError as error:
        raise UsageError(
            f"{MODULE} must be importable, but: {error}. Install flash-attn-4 to compare with it."
        ) from None

    def attend(q: Any, k: Any, v: Any) -> Any:
        turned = (tensor.transpose(1, 2) for tensor in (q, k, v))
        found = function(*turned, softmax_scale=softmax_scale(shape), causal=shape.causal is not Causal.NONE)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    if not isinstance(question, GradientQuestion):

        def forward(q: Any, k: Any, v: Any) -> Any:
            with torch.no_grad():
                return attend(q, k, v)

        return forward
    leaves = [tensor.detach().requires_grad_() for tensor in (question.q, question.k, question.v)]
    with torch.enable_grad():
        out = attend(*leaves)

    def backward(q: Any, k: Any, v: Any) -> Any:
        return torch.autograd.grad(out, leaves, question.dout, retain_graph=True)

    return backward

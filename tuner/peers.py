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

Compute = Callable[[Any, Any, Any], Any]
"""compute(q, k, v): enqueue attention on the current stream and return the output."""

PEERS = {"cudnn": "CUDNN_ATTENTION", "fa2": "FLASH_ATTENTION"}
"""PyTorch's back ends by the name that they have here; fa2 is FlashAttention-2."""


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
        with torch.no_grad(), sdpa_kernel(chosen):
            return attend(q, k, v)

    return compute

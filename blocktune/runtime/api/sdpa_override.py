"""Our kernels in place of PyTorch's FlashAttention, in a whole process and without a change of its code.

`torch.nn.attention` keeps a registry of implementations for this (torch 2.10). An implementation replaces the CUDA
kernels of aten ops, below autograd; PyTorch's own `_fa4.py` is the pattern. Two ops are replaced, those that
scaled_dot_product_attention calls. It still decides by its own rules when to call them (no mask, 16 bit, ...; see
`torch.nn.attention.sdpa_kernel`). What our kernels do not compute goes on to PyTorch's `_flash_attention_forward` and
`_flash_attention_backward`, which the replaced ops are made of, so nothing is lost.

The ops are no public interface: their schemas are compared with the ones below before anything is replaced.
"""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import attention as registry

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import Causal, Direction
from blocktune.runtime.dispatch.call import Call, PlanUse
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention
from blocktune.runtime.dispatch.launches.plans import KernelPlan, TorchPlan
from blocktune.runtime.dispatch.sdpa_arguments import scale_of

NAME = "blocktune"

FORWARD = "_scaled_dot_product_flash_attention"
BACKWARD = "_scaled_dot_product_flash_attention_backward"

_SCHEMAS = {
    FORWARD: (
        "query key value dropout_p is_causal return_debug_mask scale",
        "Tensor Tensor Tensor Tensor int int Tensor Tensor Tensor",
    ),
    BACKWARD: (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
        "philox_offset scale",
        "Tensor Tensor Tensor",
    ),
}
"""Names of the arguments and types of the results, as of torch 2.11 to 2.13."""


def replace_sdpa_flash(*, dispatcher: Dispatcher = attention) -> None:
    """Let scaled_dot_product_attention from now on call our kernels, with the dispatcher's configs, where it would call
    FlashAttention.

    It holds for the whole process until `restore_sdpa_flash`; an implementation that another library had activated is
    ended. With cuDNN in front of FlashAttention (torch on Hopper) ask for the latter:
    `with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)`.

    Raises:
        UsageError: this torch has other ops.
    """
    for name, (arguments, results) in _SCHEMAS.items():
        schema = getattr(torch.ops.aten, name).default._schema
        found = (
            " ".join(argument.name for argument in schema.arguments),
            " ".join(str(r.type) for r in schema.returns),
        )
        if found != (arguments, results):
            raise UsageError(
                f"`aten::{name}` must be ({arguments}) -> ({results}) to be replaced, but in torch {torch.__version__} "
                f"it is ({found[0]}) -> ({found[1]}). Call `blocktune.attention` instead, and update blocktune."
            )
    registry.register_flash_attention_impl(NAME, register_fn=partial(override, dispatcher=dispatcher))
    registry.activate_flash_attention_impl(NAME)


def restore_sdpa_flash() -> None:
    """Restore PyTorch's own FlashAttention; nothing happens if another implementation than ours is active."""
    if registry.current_flash_attention_impl() == NAME:
        registry.restore_flash_attention_impl()


class Override:
    """Keeps kernels in place until it is removed."""

    def __init__(self, library: Library) -> None:
        self._library: Library | None = library

    def remove(self) -> None:
        """Restore the kernels that were there before, since nothing else holds the library."""
        self._library = None


def override(key: str = "CUDA", *, dispatcher: Dispatcher = attention) -> Override:
    """Replace the kernels of one dispatch key."""
    library = Library("aten", "IMPL", key)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"[\s\S]*[Oo]verrid")  # the override is intended
        library.impl(FORWARD, partial(_forward, dispatcher), key)
        library.impl(BACKWARD, partial(_backward, dispatcher), key)
    return Override(library)


def _forward(
    dispatcher: Dispatcher,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Return the nine results of the op. PyTorch keeps the log-sum-exp, float32 [batch, heads, seqlen_q], for the
    backward."""
    found = None
    if not return_debug_mask:
        found = _plan(dispatcher, query, key, value, dropout_p, is_causal, scale, Direction.FORWARD)
    if found is None:
        turned = (tensor.transpose(1, 2) for tensor in (query, key, value))
        options = (None, None, query.shape[2], key.shape[2], dropout_p, is_causal, return_debug_mask)
        out, lse, seed, offset, mask = torch.ops.aten._flash_attention_forward(*turned, *options, scale=scale)
        return out.transpose(1, 2), lse, None, None, query.shape[2], key.shape[2], seed, offset, mask
    plan, call = found
    out, lse = plan.forward(query, key, value, call.scale, call.extras)
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # nothing is dropped
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, query.new_empty(0)


def _backward(
    dispatcher: Dispatcher,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value; it does not matter whose forward it was, the log-sum-exp is the
    same."""
    found = _plan(dispatcher, query, key, value, dropout_p, is_causal, scale, Direction.BACKWARD)
    if found is not None:
        plan, call = found
        return plan.backward(query, key, value, out, logsumexp, grad_out, call.scale, call.extras)
    turned = (tensor.transpose(1, 2) for tensor in (grad_out, query, key, value, out))
    options = (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset)
    gradients = torch.ops.aten._flash_attention_backward(*turned, logsumexp, *options, scale=scale)
    return tuple(gradient.transpose(1, 2) for gradient in gradients)


def _plan(
    dispatcher: Dispatcher,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    direction: Direction,
) -> tuple[KernelPlan, Call] | None:
    """Return our plan of one direction, or None where PyTorch's kernels compute it. Always theirs are dropout, since
    their backward drops other pairs, and causal calls whose lengths differ, since causal means another corner there."""
    if dropout_p or (is_causal and query.shape[2] != key.shape[2]):
        return None
    call = Call.of(
        causal=Causal.UPPER_LEFT if is_causal else Causal.NONE,
        scale=scale_of(query, scale),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    if not call.scale > 0:
        return None
    plan = dispatcher.plan(query, key, value, call, direction, PlanUse(sums=True, competes=True))
    return None if isinstance(plan, TorchPlan) else (plan, call)

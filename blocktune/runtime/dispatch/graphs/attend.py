"""`blocktune::attention_call`: a call with any feature, as it stands in a graph before that is traced for autograd.

It is made of the ops of ops.py with our autograd function around them. Dynamo traces and guards nothing of that.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import UNLIMITED
from blocktune.runtime.dispatch.autograd import NO_VALUES, CallValues, apply_autograd
from blocktune.runtime.dispatch.graphs.graph_call import BLOCKS, DRAWN, TENSORS, GraphCall
from blocktune.runtime.dispatch.graphs.ops import INPUTS, LIBRARY, OPS
from blocktune.runtime.dispatch.launches.layout import Layout
from blocktune.runtime.dispatch.launches.results import permute_like
from blocktune.runtime.dispatch.obstacles import is_transformed, needs_gradients
from blocktune.runtime.dispatch.torch_math import mathematics

_GIVEN = TENSORS[: TENSORS.index(DRAWN)]
"""What comes from outside: pairs to drop are drawn in the graph."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dispatcher: int,
    lse: bool,
    causal: str,
    scale: float,
    window: Sequence[int] = (UNLIMITED, UNLIMITED),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    page_size: int = 0,
    block_mask: BlockMask | None = None,
    lengths: Sequence[int] | None = None,
    num_splits: int = 0,
    **tensors: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Attend as `Engine.attend` while a graph is traced."""
    blocks_of = [0, 0]
    if block_mask is not None:
        tensors[BLOCKS], blocks_of = block_mask.mask, [block_mask.block_q, block_mask.block_k]
    options = [str(causal), scale, list(window), softcap, dropout_p, deterministic, page_size, blocks_of, num_splits]
    given = [tensors.get(name) for name in _GIVEN]
    out, sums = OPS.attention_call(query, key, value, lse, dispatcher, lengths, *options, *given)
    return out, sums if lse else None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: bool,
    dispatcher: int,
    lengths: Sequence[int] | None,
    causal: str,
    scale: float,
    window: Sequence[int],
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    page_size: int,
    block_sizes: Sequence[int],
    num_splits: int,
    *tensors: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp by the op of the forward. The pairs to drop are drawn in the graph, on the CPU: the
    op needs the number on the host, and a graph must not wait for a GPU."""
    given = {name: tensor for name, tensor in zip(_GIVEN, tensors, strict=True) if tensor is not None}
    if dropout_p:
        given[DRAWN] = torch.randint(2**62, (2,), dtype=torch.int64, device="cpu")
    call = GraphCall(
        dispatcher=dispatcher,
        lse=lse,
        causal=causal,
        scale=scale,
        window=(window[0], window[1]),
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
        page_size=page_size,
        block_sizes=(block_sizes[0], block_sizes[1]),
        num_splits=num_splits,
        tensors=tuple(given),
    )
    all_given = tuple(given.values())
    if is_transformed():
        return mathematics(query, key, value, call.call(all_given, lengths), lse=lse)
    if needs_gradients(given.get("alibi_slopes")):
        _check_slopes(given)
        out, sums = mathematics(query, key, value, call.call(all_given, lengths), lse=lse)
        return permute_like(query, out), sums
    out, sums = apply_autograd(TracedCall(call, lengths), query, key, value, all_given, NO_VALUES)
    return out, query.new_empty(0) if sums is None else sums


def _check_slopes(given: Mapping[str, Tensor]) -> None:
    """Check that a graph can hold the mathematics of a call whose slopes require a gradient.

    Raises:
        UsageError: it cannot, since they read the numbers that pairs are dropped by on the host.
    """
    if DRAWN in given:
        raise UsageError(
            "A compiled graph with dropout computes no gradient of slopes, but they require it. Detach them, or call "
            "attention outside the graph (torch.compiler.disable)."
        )


class TracedCall:
    """A call in a graph, in place of `KernelCall`: an op stands for the launch of either direction.

    Its tensors are all that it has, block masks and seeds as well.

    Args:
        call: without tensors.
        lengths: those of `Call`.
    """

    __slots__ = ("_call", "_kind", "_lengths", "layout", "lse")

    def __init__(self, call: GraphCall, lengths: Sequence[int] | None) -> None:
        self._call, self._lengths = call, lengths
        self._kind = "_dropout" if DRAWN in call.tensors else ""
        self.layout, self.lse = Layout.HEADS_FIRST, call.lse

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, tensors: Sequence[Tensor], call_values: CallValues
    ) -> tuple[Tensor, Tensor]:
        """Return the output and log-sum-exp without autograd."""
        del call_values
        out, lse = self._op("attention_forward")(query, key, value, tensors, self._lengths, self._call.text)
        return out, lse

    def gradients(
        self, saved: Sequence[Tensor], grad: Tensor, grad_lse: Tensor | None, call_values: CallValues
    ) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value, as `KernelCall.gradients` does."""
        del call_values
        dq, dk, dv = self._op("attention_backward")(*self._of_backward(saved, grad, grad_lse))
        return dq, dk, dv

    def gradient_of_bias(
        self, saved: Sequence[Tensor], grad: Tensor, grad_lse: Tensor | None, call_values: CallValues
    ) -> Tensor:
        """Return the gradient of the additive mask, as `KernelCall.gradient_of_bias` does."""
        del call_values
        found: Tensor = self._op("attention_bias_backward")(*self._of_backward(saved, grad, grad_lse))
        return found

    def _of_backward(self, saved: Sequence[Tensor], grad: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
        """Return the arguments of the ops of a backward."""
        return *saved[:5], grad, grad_lse, saved[5:], self._lengths, self._call.text

    def sinks_of(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Return the sinks among the tensors, if there are any."""
        return dict(zip(self._call.tensors, tensors, strict=True)).get("sinks")

    def bias_of(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Return the mask among the tensors, if there is one."""
        return dict(zip(self._call.tensors, tensors, strict=True)).get("mask")

    def _op(self, name: str) -> Any:
        return getattr(OPS, name + self._kind).default


LIBRARY.define(
    f"attention_call({INPUTS}, bool lse, int dispatcher, SymInt[]? lengths, str causal, float scale, int[] window, "
    "float softcap, float dropout_p, bool deterministic, int page_size, int[] block_sizes, int num_splits, "
    f"{', '.join(f'Tensor? {name}' for name in _GIVEN)}) -> (Tensor, Tensor)"
)
LIBRARY.impl("attention_call", _attend, "CompositeImplicitAutograd")

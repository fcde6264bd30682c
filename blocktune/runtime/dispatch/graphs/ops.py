"""`blocktune::attention_forward` and `blocktune::attention_backward`: how a compiled graph calls our kernels. The
gradient of an additive mask has an op of its own, `blocktune::attention_bias_backward`.

The graph holds the call and the number of its dispatcher, not the config: that is looked up when the op runs, as in an
eager call, with the shapes of then. Eager calls do not come here, since an op costs more than a launch. The ops have no
formula of autograd, which PyTorch would run in Python in every call of a graph: attend.py puts our autograd function
around them, of which nothing is left in a graph that runs.

With dropout the names of the ops end in `_dropout`. They read their seed, a tensor on
the CPU that the graph draws again in every run, when they are called, so a CUDA graph must not hold them: replays would
drop the same pairs for ever. Their tag says so to `torch.compile(mode="reduce-overhead")`, which captures what is
before and after them.

PyTorch keeps compiled graphs on disk by the ops that Dynamo saw, `scaled_dot_product_attention` and `attention_call`.
So where one of our ops gets other arguments, these two need other names: a graph that was kept calls what it was made
of.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from blocktune.runtime.dispatch.graphs.engines import engine_of
from blocktune.runtime.dispatch.graphs.flops import backward_flops, bias_flops, forward_flops
from blocktune.runtime.dispatch.graphs.graph_call import graph_call
from blocktune.runtime.dispatch.launches.results import empty_output, new_gradients

if TYPE_CHECKING:
    from blocktune.runtime.dispatch.fast_path import BoundCall, FastPath

NAMESPACE = __name__.partition(".")[0]
"""`blocktune`; a copy of this package under another name has ops of its own."""
LIBRARY, OPS = torch.library.Library(NAMESPACE, "DEF"), getattr(torch.ops, NAMESPACE)
DEVICES = ("CPU", "CUDA")
"""Whose tensors the ops take."""
INPUTS = "Tensor query, Tensor key, Tensor value"
_ASKED = "Tensor[] tensors, SymInt[]? lengths, str call"
_TAGS: Mapping[str, tuple[torch.Tag, ...]] = {"": (), "_dropout": (torch.Tag.cudagraph_unsafe,)}
"""What an op is called besides, and how it is marked."""


def _forward(
    query: Tensor, key: Tensor, value: Tensor, tensors: Sequence[Tensor], lengths: Sequence[int] | None, text: str
) -> tuple[Tensor, Tensor | None]:
    asked = graph_call(text)
    engine, options = engine_of(asked.dispatcher), _options("forward", lengths, text)
    kinds = query, key, value, *asked.guarded(tensors)
    bound = engine.find_call(options, *kinds)
    if bound is not None:
        extras, call_values = asked.parts(tensors)
        return bound.run(query, key, value, extras, call_values)
    call, remember = asked.call(tensors, lengths), _remember(options, kinds)
    return engine.forward(query, key, value, call, lse=asked.lse, remember=remember)


def _backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None,
    tensors: Sequence[Tensor], lengths: Sequence[int] | None, text: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    asked = graph_call(text)
    engine, options = engine_of(asked.dispatcher), _options("backward", lengths, text)
    kinds = query, key, value, *asked.guarded(tensors)
    bound = engine.find_call(options, *kinds)
    if bound is not None:
        extras, call_values = asked.parts(tensors)
        return bound.gradients((query, key, value, out, lse, *extras), grad, grad_lse, call_values)
    call, remember = asked.call(tensors, lengths), _remember(options, kinds)
    return engine.backward(query, key, value, out, lse, grad, call, grad_lse=grad_lse, remember=remember)


def _bias_backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None,
    tensors: Sequence[Tensor], lengths: Sequence[int] | None, text: str,
) -> Tensor:  # fmt: skip
    asked = graph_call(text)
    engine = engine_of(asked.dispatcher)
    bound = engine.find_call(_options("backward", lengths, text), query, key, value, *asked.guarded(tensors))
    if bound is not None:
        extras, call_values = asked.parts(tensors)
        return bound.gradient_of_bias((query, key, value, out, lse, *extras), grad, grad_lse, call_values)
    call = asked.call(tensors, lengths)
    return engine.gradient_of_bias(query, key, value, out, lse, grad, call, grad_lse=grad_lse)


def _options(op: str, lengths: Sequence[int] | None, text: str) -> tuple[Any, ...]:
    """Return the options by which the fast path knows an op."""
    return op, text, None if lengths is None else tuple(lengths)


def _remember(options: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> Callable[["FastPath", "BoundCall"], None]:
    return lambda fast_path, bound: fast_path.add(options, tensors, bound)


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, tensors: Sequence[Tensor], lengths: Sequence[int] | None, text: str
) -> tuple[Tensor, Tensor]:
    del key, tensors, lengths
    rows = query.shape[1:3] if "cu_seqlens_q" in graph_call(text).tensors else query.shape[:3]
    return empty_output(query, value.shape[-1]), query.new_empty(rows, dtype=torch.float32)


def _fake_backward(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    del others
    return new_gradients(query, key, value, packed=False)


def _fake_bias_backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None,
    tensors: Sequence[Tensor], lengths: Sequence[int] | None, text: str,
) -> Tensor:  # fmt: skip
    del query, key, value, out, lse, grad, grad_lse, lengths
    mask = tensors[graph_call(text).tensors.index("mask")]
    return mask.new_empty(mask.shape)


def _define(
    name: str, arguments: str, results: int, kernel: Any, fake: Any, flops: Any, tags: Sequence[torch.Tag]
) -> None:
    """Define an op on tensors."""
    LIBRARY.define(f"{name}({arguments}) -> ({', '.join(['Tensor'] * results)})", tags=tags)
    for device in DEVICES:
        LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    register_flop_formula(getattr(OPS, name), get_raw=True)(flops)


for _kind, _tags in _TAGS.items():
    _arguments = f"{INPUTS}, {_ASKED}"
    _define(f"attention_forward{_kind}", _arguments, 2, _forward, _fake_forward, forward_flops, _tags)
    _arguments = f"{INPUTS}, Tensor out, Tensor lse, Tensor grad, Tensor? grad_lse, {_ASKED}"
    _define(f"attention_backward{_kind}", _arguments, 3, _backward, _fake_backward, backward_flops, _tags)
    _define(f"attention_bias_backward{_kind}", _arguments, 1, _bias_backward, _fake_bias_backward, bias_flops, _tags)

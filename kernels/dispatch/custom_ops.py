"""`blocktune::attention_forward` and `blocktune::attention_backward`: how a compiled graph calls our kernels.

The graph holds the call and the number of its dispatcher, not the config: that is looked up when the op runs, as in an
eager call, with the shapes of then. Eager calls do not come here, since an op costs more than a launch.

With dropout the ops are `attention_forward_dropout` and `attention_backward_dropout`. They read their seed, a tensor on
the CPU that the graph draws again in every run, when they are called, so a CUDA graph must not hold them: replays would
drop the same pairs for ever. Their tag says so to `torch.compile(mode="reduce-overhead")`, which captures what is
before and after them.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from blocktune.kernels.dispatch.call import EXTRA_TENSORS, Call
from blocktune.kernels.dispatch.plan import empty_output
from blocktune.kernels.portable.sinks.results import gradient_of_sinks
from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import UNLIMITED

if TYPE_CHECKING:
    from blocktune.kernels.dispatch.autograd import Served
    from blocktune.kernels.dispatch.engine import Engine
    from blocktune.kernels.dispatch.ways import Ways

_TENSORS = (*EXTRA_TENSORS, "drawn", "blocks")
_INPUTS = "Tensor query, Tensor key, Tensor value"
_ASKED = (
    "int dispatcher, str causal, float scale, int[] window, float softcap, float dropout_p, bool deterministic, "
    "int page_size, int[] blocks_of, SymInt[]? lengths, int num_splits, "
    + ", ".join(f"Tensor? {name}" for name in _TENSORS)
)
LIBRARY = torch.library.Library("blocktune", "DEF")
DEVICES = ("CPU", "CUDA")
"""Whose tensors the ops take."""
_TAGS: Mapping[str, tuple[torch.Tag, ...]] = {"": (), "_dropout": (torch.Tag.cudagraph_unsafe,)}
"""What an op is called besides, and how it is marked."""
_engines: "WeakValueDictionary[int, Engine]" = WeakValueDictionary()
_numbers = count()


def registered(engine: "Engine") -> int:
    """Return the number by which graphs of this process name the engine. The first one is the default dispatcher's, in
    every process, so that graphs of it can be exported."""
    number = next(_numbers)
    _engines[number] = engine
    return number


def engine_of(number: int) -> "Engine":
    """Return the engine with a number.

    Raises:
        UsageError: it is not in this process, or no more.
    """
    engine = _engines.get(number)
    if engine is None:
        raise UsageError(
            f"A compiled graph runs where its dispatcher is, but dispatcher {number} is gone or was another process's. "
            "Keep the dispatcher as long as the graph; to export a graph, take the default one, `blocktune.attention`."
        )
    return engine


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
) -> tuple[Tensor, Tensor]:
    """Attend as `Engine.attend` while a graph is traced. The pairs to drop are drawn in the graph, on the CPU: the op
    needs the number on the host, and a graph must not wait for a GPU."""
    blocks, blocks_of = None, [0, 0]
    if block_mask is not None:
        blocks, blocks_of = block_mask.mask, [block_mask.block_q, block_mask.block_k]
    options = [str(causal), scale, list(window), softcap, dropout_p, deterministic, page_size, blocks_of, lengths]
    options.append(num_splits)
    seed = torch.randint(2**62, (2,), dtype=torch.int64, device="cpu") if dropout_p else None
    given = [*(tensors.get(name) for name in EXTRA_TENSORS), seed, blocks]
    own = torch.ops.blocktune
    forward = own.attention_forward if seed is None else own.attention_forward_dropout
    out, sums = forward(query, key, value, lse, dispatcher, *options, *given)
    return out, sums if lse else sums.detach()


def _call(
    causal: str,
    scale: float,
    window: Sequence[int],
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    page_size: int,
    blocks_of: Sequence[int],
    lengths: Sequence[int] | None,
    num_splits: int,
    *tensors: Tensor | None,
) -> Call:
    """Return the call that the arguments of an op say."""
    *extras, seed, blocks = tensors
    call = Call.of(
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
        page_size=page_size,
        block_mask=None if blocks is None else BlockMask(blocks_of[0], blocks_of[1], blocks),
        lengths=lengths,
        num_splits=num_splits,
        **dict(zip(EXTRA_TENSORS, extras, strict=True)),
    )
    return call if seed is None else call.with_seed(*seed.tolist())


def _forward(
    query: Tensor, key: Tensor, value: Tensor, lse: bool, dispatcher: int, *asked: Any
) -> tuple[Tensor, Tensor | None]:
    engine, options, tensors = engine_of(dispatcher), _options("forward", *asked), (query, key, value, *_extras(asked))
    served = None if options is None else engine.way(options, *tensors)
    if served is not None:
        return served(query, key, value, *(tensor for tensor in tensors[3:] if tensor is not None))
    return engine.forward(query, key, value, _call(*asked), lse=lse, remember=_remember(options, tensors))


def _backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None,
    dispatcher: int, *asked: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    engine, options, tensors = engine_of(dispatcher), _options("backward", *asked), (query, key, value, *_extras(asked))
    served = None if options is None else engine.way(options, *tensors)
    if served is not None and served.backward is not None:
        given = [tensor for tensor in tensors[3:] if tensor is not None]
        dq, dk, dv = served.gradients((query, key, value, out, lse, *given), grad, grad_lse)
        return dq, dk, dv
    remember = _remember(options, tensors)
    return engine.backward(query, key, value, out, lse, grad, _call(*asked), grad_lse=grad_lse, remember=remember)


def _options(
    op: str,
    causal: str,
    scale: float,
    window: Sequence[int],
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    page_size: int,
    blocks_of: Sequence[int],
    lengths: Sequence[int] | None,
    num_splits: int,
    *tensors: Tensor | None,
) -> tuple[Any, ...] | None:
    """Return the options of the short way to what serves an op; None for what has a seed or a block mask in it."""
    if dropout_p or tensors[-1] is not None:
        return None
    del blocks_of
    known = None if lengths is None else tuple(lengths)
    return op, causal, scale, tuple(window), softcap, deterministic, page_size, known, num_splits


def _extras(asked: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """Return the tensors of `EXTRA_TENSORS` among the arguments of an op."""
    return asked[-len(_TENSORS) : -len(_TENSORS) + len(EXTRA_TENSORS)]


def _remember(
    options: tuple[Any, ...] | None, tensors: tuple[Tensor | None, ...]
) -> Callable[["Ways", "Served"], None] | None:
    return None if options is None else lambda ways, served: ways.add(options, tensors, served)


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, lse: bool, *asked: Any) -> tuple[Tensor, Tensor]:
    del key, lse
    packed = asked[-len(_TENSORS) + EXTRA_TENSORS.index("cu_seqlens_q")] is not None
    rows = query.shape[1:3] if packed else query.shape[:3]
    return empty_output(query, value.shape[-1]), query.new_empty(rows, dtype=torch.float32)


def _fake_backward(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    del others
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, _, *asked = inputs
    ctx.set_materialize_grads(False)
    ctx.asked = asked[: -len(_TENSORS)]
    ctx.save_for_backward(query, key, value, *output, *asked[-len(_TENSORS) :])


def _gradients(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, lse, *tensors = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    own, seed = torch.ops.blocktune, tensors[_TENSORS.index("drawn")]
    backward = own.attention_backward if seed is None else own.attention_backward_dropout
    gradients = backward(query, key, value, out, lse, grad, grad_lse, *ctx.asked, *tensors)
    of_tensors: list[Tensor | None] = [None] * len(tensors)
    place = _TENSORS.index("sinks")
    if ctx.needs_input_grad[len(_INPUTS.split(",")) + 1 + len(ctx.asked) + place]:
        of_tensors[place] = gradient_of_sinks(out, lse, grad, grad_lse, tensors[place])
    return *gradients, None, *(None for _ in ctx.asked), *of_tensors


def _no_second(ctx: Any, *grads: Tensor | None) -> None:
    """Refuse a second derivative.

    Raises:
        UsageError: always; the gradients of attention have no gradients.
    """
    del ctx, grads
    raise UsageError(
        "Attention can be differentiated once, but a gradient of its gradients is requested. Take "
        "torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH for second derivatives."
    )


for _kind, _tags in _TAGS.items():
    _forward_op, _backward_op = f"attention_forward{_kind}", f"attention_backward{_kind}"
    LIBRARY.define(f"{_forward_op}({_INPUTS}, bool lse, {_ASKED}) -> (Tensor, Tensor)", tags=_tags)
    LIBRARY.define(
        f"{_backward_op}({_INPUTS}, Tensor out, Tensor lse, Tensor grad, Tensor? grad_lse, {_ASKED})"
        " -> (Tensor, Tensor, Tensor)",
        tags=_tags,
    )
    for _device in DEVICES:
        LIBRARY.impl(_forward_op, _forward, _device)
        LIBRARY.impl(_backward_op, _backward, _device)
    torch.library.register_fake(f"blocktune::{_forward_op}", _fake_forward, lib=LIBRARY)
    torch.library.register_fake(f"blocktune::{_backward_op}", _fake_backward, lib=LIBRARY)
    torch.library.register_autograd(f"blocktune::{_forward_op}", _gradients, setup_context=_keep, lib=LIBRARY)
    torch.library.register_autograd(f"blocktune::{_backward_op}", _no_second, lib=LIBRARY)

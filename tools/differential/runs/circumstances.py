"""A call under the circumstances of its case: streams, threads, captured graphs, memory, hooks, inference mode."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from tools.differential.calls.tools import offloading, reordering
from tools.differential.cases.case import Case
from tools.differential.cases.enums import COMPILED, Mode
from tools.differential.cases.tensors import Inputs

THREADS = 4
SCRIBBLED = (128, 1 << 12, 1 << 16, 1 << 20)
"""Numbers in blocks of memory that is written to and freed."""

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter is for one thread."""

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
Results = tuple[Tensor, ...]
"""The output, and the gradients that were asked for."""


def leaves_of(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, those of `case.needs` requiring gradients."""
    views = inputs.query.tensor, inputs.key.tensor, inputs.value.tensor
    needed = case.needs if case.kind.gradients else ""
    query, key, value = (view.detach().requires_grad_(name in needed) for name, view in zip("qkv", views, strict=True))
    return query, key, value


def attend(function: Function, leaves: tuple[Tensor, Tensor, Tensor], inputs: Inputs) -> Results:
    """The output, and with it the gradients of the tensors that require one."""
    out = function(*leaves)
    wanted = [leaf for leaf in (*leaves, *inputs.wanted) if leaf.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return (out,)
    return out, *torch.autograd.grad(out, wanted, inputs.grad.to(out.dtype), materialize_grads=True)


def call_results(case: Case, inputs: Inputs, function: Function) -> list[Results]:
    """The results of every call that the case's circumstances make; each of them must be right."""
    leaves = leaves_of(case, inputs)

    def call() -> Results:
        return attend(function, leaves, inputs)

    if case.mode is Mode.THREADS and not INTERPRETS:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(lambda _: call(), range(THREADS)))
    on_gpu = _ON_GPU.get(case.mode) if leaves[0].is_cuda else None
    if on_gpu is not None:
        return on_gpu(inputs, call)
    if case.mode is Mode.WARMED:
        return _warm_up(inputs, leaves, function, call)
    calls = (
        3 if case.mode in COMPILED else 2
    )  # the second call takes a shorter way, the third one of a graph is replayed
    with enter_mode(case, leaves[0].device):
        if case.mode not in COMPILED:
            return [call() for _ in range(calls)]
        found = []
        for _ in range(calls):
            torch.compiler.cudagraph_mark_step_begin()
            found.append(_keep_results(call()))  # the next call writes where this one has
        return found


@contextmanager
def enter_mode(case: Case, device: torch.device) -> Iterator[None]:
    """The case's mode, as far as it is one of PyTorch's own."""
    with ExitStack() as stack:
        if case.mode is Mode.NO_GRAD:
            stack.enter_context(torch.no_grad())
        elif case.mode is Mode.INFERENCE:
            stack.enter_context(torch.inference_mode())
        elif case.mode is Mode.AUTOCAST:
            stack.enter_context(torch.autocast(device.type, getattr(torch, case.kind.dtype)))
        elif case.mode in (Mode.OFFLOADED, Mode.CHECKPOINT):
            stack.enter_context(offloading())
        elif case.mode is Mode.REORDERED:
            stack.enter_context(reordering())
        elif case.mode is Mode.DEFAULTS:
            stack.enter_context(torch.device("meta"))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        yield


def _warm_up(
    inputs: Inputs, leaves: tuple[Tensor, Tensor, Tensor], function: Function, call: Callable[[], Results]
) -> list[Results]:
    """After calls of the same kind, with other values, without gradients, and in inference mode."""
    with _other_values(inputs):
        call()
        with torch.no_grad():
            function(*leaves)
        with torch.inference_mode():
            function(*leaves)
    return [call() for _ in range(2)]


@contextmanager
def _other_values(inputs: Inputs) -> Iterator[None]:
    """Query, key and value are other ones."""
    kept = [memory.clone() for memory in inputs.memories]
    _write(inputs.memories, [torch.full_like(memory, 0.25) for memory in kept])
    try:
        yield
    finally:
        _write(inputs.memories, kept)


def _streamed(inputs: Inputs, call: Callable[[], Results]) -> list[Results]:
    return [_on(torch.cuda.Stream(), call)]


def _on(stream: torch.cuda.Stream, call: Callable[[], Results]) -> Results:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = call()
    torch.cuda.current_stream().wait_stream(stream)
    return results


def _on_two_streams(inputs: Inputs, call: Callable[[], Results]) -> list[Results]:
    """Calls on two streams that wait for the inputs alone."""
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    found = []
    for _ in range(3):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(call())
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    return found


def _in_a_pool(inputs: Inputs, call: Callable[[], Results]) -> list[Results]:
    """The first calls in a private pool, and one after the pool is gone."""
    forget()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = [call() for _ in range(2)]
    found = [_keep_results(results) for results in inside]
    del inside, pool
    scribble(inputs)
    return [*found, call()]


def _emptied(inputs: Inputs, call: Callable[[], Results]) -> list[Results]:
    found = [_keep_results(call())]
    torch.cuda.empty_cache()
    scribble(inputs)
    return [*found, call()]


def _replay_capture(inputs: Inputs, call: Callable[[], Results]) -> list[Results]:
    """What replays compute after the inputs have changed: the graph was captured with others."""
    with _other_values(inputs):
        stream = torch.cuda.Stream()
        for _ in range(2):
            _on(stream, call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()
    found = []
    for _ in range(2):
        scribble(inputs)
        graph.replay()
        found.append(_keep_results(results))
    torch.cuda.synchronize()
    del results, graph
    torch.cuda.empty_cache()  # a graph's memory is its own: that of many would add up
    return found


def _captured_first(inputs: Inputs, call: Callable[[], Results]) -> list[Results]:
    """The first call is captured, which may be refused; what comes then must be right."""
    forget()
    torch.cuda.synchronize()
    found = []
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()
        graph.replay()
        found.append(_keep_results(results))
    except ValueError as error:
        if "captur" not in str(error):
            raise
    return [*found, call(), *_replay_capture(inputs, call)]


def forget() -> None:
    """Makes the next call the first one of its kind."""
    from blocktune.runtime.dispatch.dispatcher import attention

    attention.reload()


def scribble(inputs: Inputs) -> None:
    """Writes what is no number into memory that is free."""
    device = inputs.query.tensor.device
    blocks = [torch.full((size,), float("nan"), device=device) for size in SCRIBBLED for _ in range(4)]
    del blocks


def _keep_results(results: Results) -> Results:
    """Copies that outlive the memory of the results; the output still requires a gradient if it did."""
    return tuple(result.clone() for result in results)


def _write(memories: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for memory, value in zip(memories, values, strict=True):
            memory.copy_(value)


_ON_GPU: dict[Mode, Callable[[Inputs, Callable[[], Results]], list[Results]]] = {
    Mode.STREAM: _streamed,
    Mode.TWO_STREAMS: _on_two_streams,
    Mode.GRAPH: _replay_capture,
    Mode.FIRST_GRAPH: _captured_first,
    Mode.POOL: _in_a_pool,
    Mode.EMPTIED: _emptied,
}

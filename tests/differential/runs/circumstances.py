"""A call under the circumstances of its case: streams, threads, captured graphs, inference mode, autocast."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from tests.differential.cases.case import Case, Mode
from tests.differential.cases.tensors import Inputs

THREADS = 4
Function = Callable[[Tensor, Tensor, Tensor], Tensor]
Results = tuple[Tensor, ...]
"""The output, and the gradients that were asked for."""


def leaves_of(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, those of `case.needs` requiring gradients."""
    views = inputs.query.tensor, inputs.key.tensor, inputs.value.tensor
    needed = case.needs if case.kind.gradients else ""
    query, key, value = (view.detach().requires_grad_(name in needed) for name, view in zip("qkv", views, strict=True))
    return query, key, value


def attended(function: Function, leaves: tuple[Tensor, Tensor, Tensor], grad: Tensor) -> Results:
    """The output, and with it the gradients of the leaves that require one."""
    out = function(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return (out,)
    return out, *torch.autograd.grad(out, wanted, grad.to(out.dtype), materialize_grads=True)


def called(case: Case, inputs: Inputs, function: Function) -> list[Results]:
    """The results of every call that the case's circumstances make; each of them must be right."""
    leaves, grad = leaves_of(case, inputs), inputs.grad
    if case.mode is Mode.THREADS:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(lambda _: attended(function, leaves, grad), range(THREADS)))
    if case.mode is Mode.GRAPH and leaves[0].is_cuda:
        return [_captured(inputs, lambda: attended(function, leaves, grad))]
    if case.mode is Mode.STREAM and leaves[0].is_cuda:
        return [_streamed(lambda: attended(function, leaves, grad))]
    with entered(case, leaves[0].device):
        return [attended(function, leaves, grad) for _ in range(2)]  # the second call takes a shorter way


@contextmanager
def entered(case: Case, device: torch.device) -> Iterator[None]:
    """The case's mode, as far as it is one of PyTorch's own."""
    with ExitStack() as stack:
        if case.mode is Mode.NO_GRAD:
            stack.enter_context(torch.no_grad())
        elif case.mode is Mode.INFERENCE:
            stack.enter_context(torch.inference_mode())
        elif case.mode is Mode.AUTOCAST:
            stack.enter_context(torch.autocast(device.type, getattr(torch, case.kind.dtype)))
        yield


def _streamed(call: Callable[[], Results]) -> Results:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = call()
    torch.cuda.current_stream().wait_stream(stream)
    return results


def _captured(inputs: Inputs, call: Callable[[], Results]) -> Results:
    """What a replay computes after the inputs have changed: it was captured with others."""
    kept = [memory.clone() for memory in inputs.memories]
    _write(inputs.memories, [torch.full_like(memory, 0.25) for memory in kept])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    _write(inputs.memories, kept)
    graph.replay()
    copies = tuple(result.detach().clone() for result in results)
    torch.cuda.synchronize()
    del results, graph
    torch.cuda.empty_cache()  # a graph's memory is its own: that of many would add up
    return copies


def _write(memories: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for memory, value in zip(memories, values, strict=True):
            memory.copy_(value)

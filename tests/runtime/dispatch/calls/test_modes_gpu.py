"""Every entry point in every mode of PyTorch: the numbers of an eager call, and no memory left in a foreign pool."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune.kernels.portable.decode import scratch
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from tests.support.attention.mode_calls import CALLS, ModeCall, mode_calls
from tests.support.fakes.dispatch_fakes import ListSource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # one that PyTorch captures to begin its pool
]

SEEDS = 5
TOLERANCE = 2e-2
"""Of numbers of 16 bits, relative to the largest: graphs may take kernels that add up in another order."""


@pytest.fixture(autouse=True)
def _no_kept_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which no launch has kept memory yet, and no graph was compiled."""
    monkeypatch.setattr(scratch, "_kept", {})
    monkeypatch.setattr(scratch, "_spare", {})
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def call_named(name: str) -> ModeCall:
    """Return the call, of a dispatcher that has seen none."""
    return mode_calls(Dispatcher(ListSource()))[name]


def eager_results(name: str) -> list[list[Tensor]]:
    """Return the results of eager calls, by seed."""
    call = call_named(name)
    return [call.run(call.attend, call.fresh(seed)) for seed in range(SEEDS)]


def assert_same(got: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        one, other = one.detach().double(), other.detach().double()
        assert float((one - other).abs().max() / other.abs().max().clamp(min=1e-3)) <= TOLERANCE


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("name", CALLS)
def test_compiled(name: str, mode: str) -> None:
    wanted, call = eager_results(name), call_named(name)
    scratch._kept.clear()
    attend = torch.compile(lambda *tensors: call.attend(*tensors), fullgraph=True, mode=mode)
    for seed in range(SEEDS):
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(call.run(attend, call.fresh(seed)), wanted[seed])


def captured(
    call: ModeCall, attend: Callable[..., Any]
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], list[Tensor]]:
    """Return a graph of the call, its inputs and its results."""
    inputs, graph = call.fresh(0), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = call.run(attend, inputs)
    return graph, inputs, results


@pytest.mark.parametrize("warmups", [0, 3])
@pytest.mark.parametrize("name", CALLS)
def test_captured(name: str, warmups: int) -> None:
    wanted, call = eager_results(name), call_named(name)
    scratch._kept.clear()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            call.run(call.attend, call.fresh(0))
    graph, inputs, results = captured(call, call.attend)
    for seed in range(SEEDS):
        for tensor, fresh in zip(inputs, call.fresh(seed), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        assert_same(results, wanted[seed])
    assert_same(call.run(call.attend, call.fresh(0)), wanted[0])  # an eager call after the capture


@pytest.mark.parametrize("name", CALLS)
def test_in_a_pool_of_the_user(name: str) -> None:
    wanted, call = eager_results(name), call_named(name)
    scratch._kept.clear()
    pool = torch.cuda.MemPool()
    inputs = call.fresh(0)
    with torch.cuda.use_mem_pool(pool):
        for _ in range(4):
            results = call.run(call.attend, inputs)
    assert_same(results, wanted[0])
    del results
    torch.cuda.synchronize()
    left = [block for segment in pool.snapshot() for block in segment["blocks"] if block["state"] == "active_allocated"]
    if name not in ("block mask", "training with a block mask"):  # the lists of a BlockMask are the user's object
        assert left == []
    del pool
    torch.cuda.empty_cache()
    for seed in range(SEEDS):
        assert_same(call.run(call.attend, call.fresh(seed)), wanted[seed])


@pytest.mark.parametrize("name", CALLS)
def test_on_two_streams_and_after_empty_cache(name: str) -> None:
    wanted, call = eager_results(name), call_named(name)
    scratch._kept.clear()
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [call.fresh(seed) for seed in range(SEEDS)]
    torch.cuda.synchronize()
    for _ in range(3):
        found = []
        for seed in range(SEEDS):
            with torch.cuda.stream(streams[seed % 2]):
                found.append(call.run(call.attend, inputs[seed]))
        torch.cuda.synchronize()
        for seed in range(SEEDS):
            assert_same(found[seed], wanted[seed])
        del found
        torch.cuda.empty_cache()

"""Calls that the forward over parts of the keys serves on Hopper: gradients, captured and compiled graphs, streams."""

from typing import Any

import pytest
import torch

from blocktune.kernels.hopper.forward.split.kernel import FlashForwardHopperSplit
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from tests.runtime.dispatch.calls.test_captured_calls_gpu import Case, assert_right, captured
from tests.support.fakes.dispatch_fakes import ListSource
from tests.support.hopper_gpu import skip_elsewhere

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

SHAPES = [(1, 8, 2, 300, 7000, 128), (2, 4, 4, 257, 4099, 64), (1, 4, 4, 4096, 4096, 128), (1, 6, 2, 130, 5001, 72)]
"""Batch, heads, heads of keys, queries, keys, columns."""
BOUND = 1e-2


@pytest.fixture(autouse=True)
def _hopper_alone() -> None:
    skip_elsewhere(FlashForwardHopperSplit())


@pytest.fixture(autouse=True)
def _no_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktune.runtime.selection.pytorch_rival.CAUTION", -100.0)


def case_of(shape: tuple[int, ...], *, gradients: bool) -> Case:
    """A call, causal where queries and keys are as many."""
    torch.manual_seed(0)
    batch, heads, heads_kv, rows, keys, dim = shape
    sizes = [(heads, rows), (heads_kv, keys), (heads_kv, keys), (heads, rows)]
    memories = [torch.randn(batch, *own, dim, dtype=torch.bfloat16, device="cuda") for own in sizes]
    options: dict[str, Any] = {"scale": 0.2, "enable_gqa": heads != heads_kv, "is_causal": rows == keys}
    return Case(memories, options, gradients)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eager_captured_and_compiled_calls_compute_the_same(shape: tuple[int, ...], gradients: bool) -> None:
    """The log-sum-exp of the merge is what the backward needs."""
    case, dispatcher = case_of(shape, gradients=gradients), Dispatcher(ListSource())
    right = case.right()
    for number in range(4):
        assert_right(case.call(dispatcher, case.memories), right, BOUND, f"eager call {number}")
    config = dispatcher.explain(*case.memories[:3], **case.options).config
    assert config is not None
    assert config.kernel == FlashForwardHopperSplit.name
    assert_right(captured(case, dispatcher, 5), right, BOUND, "captured")
    torch._dynamo.reset()
    attend = torch.compile(lambda *tensors: dispatcher(*tensors, **case.options), fullgraph=True)
    assert_right(Case(case.memories, {}, gradients).call(attend, case.memories), right, BOUND, "compiled")


def test_streams_have_parts_of_their_own() -> None:
    """Launches of two streams run together, by plans that both share."""
    cases, dispatcher = [case_of(SHAPES[0], gradients=False) for _ in range(2)], Dispatcher(ListSource())
    cases[1].memories[0].mul_(-1.0)
    right = [case.right()[0] for case in cases]
    for case in cases:
        for _ in range(4):
            case.call(dispatcher, case.memories)
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for stream, case, outputs in zip(streams, cases, found, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(case.call(dispatcher, case.memories)[0])
    torch.cuda.synchronize()
    for outputs, expected in zip(found, right, strict=True):
        assert (outputs[0].double() - expected).norm() <= BOUND * expected.norm()
        assert all(torch.equal(out, outputs[0]) for out in outputs)

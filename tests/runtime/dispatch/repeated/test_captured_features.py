"""Calls with features inside of a capture of a CUDA graph, without a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.dispatch import engine, obstacles, resolver
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.selection import canary
from tests.runtime.dispatch.calls.test_engine import KEYS, Kernels, inputs
from tests.support.fakes.dispatch_fakes import ListSource
from tests.support.fakes.feature_fakes import pretend_features

pytestmark = pytest.mark.triton_free


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return pretend_features(monkeypatch)


def test_what_a_graph_cannot_capture_is_refused_or_pytorchs(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, dispatcher = inputs(grad=False), Dispatcher(ListSource())
    for module in (resolver, engine, obstacles):
        monkeypatch.setattr(module, "is_capturing", lambda query: True)
    assert dispatcher(*leaves, dropout_p=0.5, enable_gqa=True).shape == leaves[0].shape
    with pytest.raises(UsageError, match="cannot be captured"):
        dispatcher.attend(*leaves, causal=Causal.NONE, scale=0.25, softcap=2.0, dropout_p=0.5)
    with pytest.raises(UsageError, match="cannot be captured"):
        dispatcher.attend(*leaves, causal=Causal.NONE, scale=0.25, dropout_p=0.5, lse=True)
    with monkeypatch.context() as patch:  # PyTorch draws by itself: a generator that is captured says no offset
        patch.setattr(engine, "with_new_seed", None)
        assert dispatcher.attend(*leaves, causal=Causal.NONE, scale=0.25, dropout_p=0.5)[0].shape == leaves[0].shape
    assert kernels[0].launched == []


def test_a_shape_that_is_new_in_a_capture_is_tried_beside_it_with_blank_tables(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def run(task: Callable[[], Any], device: torch.device) -> Any:
        threads.append("side")
        return task()

    monkeypatch.setattr(resolver, "is_capturing", lambda query: True)
    monkeypatch.setattr(resolver, "run_on_side_thread", run)
    monkeypatch.setattr(canary, "sampled", None)  # what the graph will compute is not there yet
    leaves, dispatcher = inputs(grad=False), Dispatcher(ListSource())
    ends = torch.tensor([0, 1, 7], dtype=torch.int32)[1:]  # not aligned
    for _ in range(2):
        dispatcher.attend(*leaves, causal=Causal.NONE, scale=0.25, softcap=2.0)
    assert threads == ["side"]
    assert not dispatcher.resolver.plans  # a call outside of the capture is compared
    blank = Call.of(causal="none", scale=1.0, cache_seqlens=ends, lengths=(2, 20, KEYS)).blank()
    lengths = blank.extras.cache_seqlens
    assert lengths is not None
    assert (lengths.tolist(), lengths.stride()) == ([0, 0], ends.stride())
    assert lengths.data_ptr() % 16 == ends.data_ptr() % 16

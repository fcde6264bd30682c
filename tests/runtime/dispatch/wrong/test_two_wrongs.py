"""Calls with two things wrong or unusual at once are answered as by the installed PyTorch: unusual tensors with every
option that is.

Which of the two PyTorch meets first decides what it raises, and with some tensors it computes what it refuses with
others. Our kernels may judge no call that is PyTorch's to answer.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.dispatch import dispatcher as dispatch
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.torch_attention import scaled_dot_product_attention as pytorchs
from tests.runtime.dispatch.wrong.test_wrong_calls import (
    OPTIONS,
    TENSORS,
    Answer,
    Call,
    answer,
    assert_same,
    pretend_gpu,
)
from tests.support.fakes.dispatch_fakes import ListSource

pytestmark = pytest.mark.triton_free

NO_KEYS = {"no keys", "no heads of keys"}
REFUSED = {"dropout -0.1", "dropout nan"}
"""PyTorch's mathematics compute without dropout what its fused backends refuse; our kernels refuse it."""


def theirs(call: Call, *, gradients: bool) -> Answer:
    """PyTorch's answer, by its mathematics where its fused backend would read past the end of a value."""
    keys = [tensor.shape[:-1] for tensor in call[0][1:3] if isinstance(tensor, Tensor)]
    with sdpa_kernel(SDPBackend.MATH) if len({*keys}) > 1 else nullcontext():
        return answer(pytorchs, call, gradients=gradients)


def calls_with(tensors: str) -> dict[str, Call]:
    """Calls with these tensors by the name of the option that is wrong. What a scale that is no number does where there
    is nothing to weigh is left out."""
    arguments, given = TENSORS[tensors]
    left_out = {"scale nan"} if tensors in NO_KEYS else set()
    return {name: (arguments, given | options) for name, options in OPTIONS.items() if name not in left_out}


@pytest.mark.few(14)
@pytest.mark.parametrize("tensors", TENSORS)
def test_on_the_cpu(tensors: str) -> None:
    for call in calls_with(tensors).values():
        assert_same(answer(Dispatcher(ListSource()), call), theirs(call, gradients=False))


@pytest.mark.few(14)
@pytest.mark.parametrize("tensors", TENSORS)
def test_what_a_compiled_graph_would_hold(monkeypatch: pytest.MonkeyPatch, tensors: str) -> None:
    monkeypatch.setattr(dispatch, "is_compiling", lambda: True)
    for call in calls_with(tensors).values():
        assert_same(answer(Dispatcher(ListSource()), call), theirs(call, gradients=False))


@pytest.mark.few(14)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("tensors", TENSORS)
def test_before_our_kernels(monkeypatch: pytest.MonkeyPatch, tensors: str, gradients: bool) -> None:
    dispatcher = pretend_gpu(monkeypatch)
    for name, call in calls_with(tensors).items():
        ours = answer(dispatcher, call, gradients=gradients)
        if not (name in REFUSED and isinstance(ours, UsageError)):
            assert_same(ours, theirs(call, gradients=gradients))


@pytest.mark.parametrize(
    "options", [{"scale": torch.tensor(0.5)}, {"dropout_p": torch.tensor(0.0)}], ids=["scale", "dropout"]
)
def test_a_value_with_fewer_keys_is_never_read_past_its_end(options: dict[str, Any]) -> None:
    """PyTorch converts such options itself; its fused backend on the CPU does not look at the value's length."""
    arguments, _ = TENSORS["another length of values"]
    with pytest.raises(RuntimeError, match="size"):
        Dispatcher(ListSource())(*arguments, **options)


def test_a_compiled_call_reads_no_value_past_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, _ = TENSORS["another length of values"]
    compiled = torch.compile(Dispatcher(ListSource()), backend="eager")
    with pytest.raises(RuntimeError, match="size"):  # PyTorch's: the graph breaks there
        compiled(*arguments)
    monkeypatch.setattr(dispatch, "is_compiling", lambda: True)
    with pytest.raises(UsageError, match=r"key and value must have one length, but got 24 and 20\."):
        Dispatcher(ListSource())(*arguments)

"""The short way to a plan: it is taken only where nothing but the key decides about a call, and the key has it all."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from blocktune.kernels.dispatch import guards
from blocktune.kernels.dispatch.plan import SdpaPlan, needs_gradients, plan_key
from blocktune.kernels.dispatch.plan_table import PlanTable
from blocktune.kernels.selection.explanation import Explanation
from blocktune.kernels.selection.fallback import Rung
from tests.support.dispatch_fakes import shape_like, tensors

SHAPE = shape_like(32)
Three = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(params=["guards", "keys", pytest.param("cuda", marks=pytest.mark.gpu)])
def known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[PlanTable, Three, SdpaPlan]:
    """A table with a plan for these tensors, which was asked for last; with PyTorch's guards or without."""
    if request.param == "keys":
        monkeypatch.setattr(guards, "_guards", lambda: None)
    query, key, value = (tensor.to("cuda" if request.param == "cuda" else "cpu") for tensor in tensors(SHAPE))
    arguments = query, key, value
    explanation = Explanation(rung=Rung.SDPA, reason="a test")
    table, known_plan = PlanTable(), SdpaPlan(explanation, is_causal=False, enable_gqa=False)
    table[plan_key(*arguments, False, False)] = known_plan
    assert table.of(*arguments, False, False) is known_plan
    return table, arguments, known_plan


@pytest.mark.parametrize(
    "state",
    [
        lambda device: torch.autocast(device, dtype=torch.bfloat16),
        lambda device: FakeTensorMode(),
        lambda device: torch.autograd.forward_ad.dual_level(),
        lambda device: FlopCounterMode(display=False),
    ],
)
def test_a_state_of_pytorch_is_asked_for_in_every_call(
    known: tuple[PlanTable, Three, SdpaPlan], state: Callable[[str], AbstractContextManager[Any]]
) -> None:
    table, arguments, plan = known
    with state(arguments[0].device.type):
        assert table.of(*arguments, False, False) is None
    assert table.of(*arguments, False, False) is plan


def test_transforms_and_tracers_are_asked_for_in_every_call(known: tuple[PlanTable, Three, SdpaPlan]) -> None:
    table, arguments, _ = known
    seen: list[Any] = []

    def ask(tensor: Tensor) -> Tensor:
        seen.append(table.of(*arguments, False, False))
        return tensor

    torch.vmap(ask)(torch.zeros(3))
    torch.func.grad(lambda tensor: ask(tensor).sum())(torch.zeros(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(ask, (torch.zeros(3),), check_trace=False)
    assert seen == [None, None, None]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
        lambda tensor: tensor.clone().requires_grad_(),
        lambda tensor: tensor[:, :2],
        lambda tensor: tensor[:, :, :31],
        lambda tensor: tensor.half(),
        lambda tensor: tensor.mT.contiguous().mT,
        lambda tensor: tensor.expand(4, -1, -1, -1),
        lambda tensor: torch.empty(1, 4, 32, 72, device=tensor.device)[..., :64],
        lambda tensor: tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape),
        lambda tensor: tensor.to_sparse(),
    ],
)
def test_what_a_plan_relies_on_is_asked_of_every_tensor(
    known: tuple[PlanTable, Three, SdpaPlan], place: int, change: Callable[[Tensor], Tensor]
) -> None:
    table, arguments, plan = known
    changed = list(arguments)
    changed[place] = change(arguments[place])
    assert table.of(*changed, False, False) is None
    assert table.of(*arguments, False, False) is plan


def test_the_options_are_in_the_key_and_gradients_count_where_they_are_recorded(
    known: tuple[PlanTable, Three, SdpaPlan],
) -> None:
    table, (query, key, value), plan = known
    assert table.of(query, key, value, True, False) is None
    assert table.of(query, key, value, False, True) is None
    query.requires_grad_()
    assert needs_gradients(query, key, value)
    assert table.of(query, key, value, False, False) is None
    with torch.no_grad():
        assert table.of(query, key, value, False, False) is plan
    table.clear()
    with torch.no_grad():
        assert table.of(query, key, value, False, False) is None


def test_two_shapes_in_turns_have_their_own_plans(known: tuple[PlanTable, Three, SdpaPlan]) -> None:
    table, (query, key, value), plan = known
    shorter = query[:, :, :16].clone()
    other = SdpaPlan(plan.explanation, is_causal=False, enable_gqa=False)
    table[plan_key(shorter, key, value, False, False)] = other
    table[plan_key(query, key, value, True, False)] = other
    for _ in range(3):
        assert table.of(shorter, key, value, False, False) is other
        assert table.of(query, key, value, False, False) is plan
        assert table.of(query, key, value, True, False) is other


def test_one_tensor_in_several_places_and_inference_mode(known: tuple[PlanTable, Three, SdpaPlan]) -> None:
    table, (query, key, value), plan = known
    for _ in range(2):
        assert table.of(query, query, query, False, False) is plan
        with torch.inference_mode():
            assert table.of(query, key, value, False, False) is plan
            made = query.clone()
            assert table.of(made, key, value, False, False) is plan
        assert table.of(query, key, value, False, False) is plan


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_this_pytorch_has_the_guards(device: str) -> None:
    """Without them everything works, but takes twice as long."""
    assert guards._guards() is not None
    query, key, value = (tensor.to(device) for tensor in tensors(SHAPE))
    guard = guards.guard_of(query, key, value)
    assert guard(query, key, value)
    assert guard(query.clone(), key.clone(), value.clone())
    assert not guard(query, query, value)


def test_tensors_without_strides_are_asked_for_none(known: tuple[PlanTable, Three, SdpaPlan]) -> None:
    """PyTorch's guards end the process when a tensor refuses to tell its strides."""
    table, arguments, plan = known
    entries = [torch.randn(4, length, 64) for length in (3, 5)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some of these are called a prototype
        nested = torch.nested.nested_tensor(entries, layout=torch.strided)
        others = torch.eye(16).to_sparse(), torch.eye(16).to_sparse_csr(), torch.eye(16).to_mkldnn()
    assert type(nested) is Tensor
    for strange in (nested, *others):
        for place in range(3):
            changed = list(arguments)
            changed[place] = strange
            assert table.of(*changed, False, False) is None
            assert table.of(*arguments, False, False) is plan


def test_guards_that_answer_otherwise_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Guards:
        def __init__(self, *tensors: Tensor, **_: object) -> None:
            self.check = lambda *others: True

    class Refusing(Guards):
        def __init__(self, *tensors: Tensor) -> None:
            raise AssertionError

    for changed in (Guards, Refusing):
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", changed)
        assert guards._guards.__wrapped__() is None

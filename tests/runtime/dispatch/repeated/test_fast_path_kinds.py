"""The fast path is taken only by tensors of the kinds that it was added for, with PyTorch's guards and without them."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from blocktune.runtime.dispatch.fast_path import MAX_GUARDS, FastPath
from blocktune.runtime.dispatch.launches import guards
from tests.support.fakes.dispatch_fakes import shape_like, tensors

pytestmark = pytest.mark.triton_free

SHAPE = shape_like(32)
Three = tuple[Tensor, Tensor, Tensor]
OPTIONS = ("a call", False, None)


class Server:
    """BoundCall no calls, but can be found."""

    drops = False

    def __call__(self, *tensors: Any, **call_values: Any) -> tuple[Tensor, None]:
        raise AssertionError


Known = tuple[FastPath, Three, Server]


@pytest.fixture(params=["guards", "keys", pytest.param("cuda", marks=pytest.mark.gpu)])
def known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Known:
    """What is known of a call with these tensors, with PyTorch's guards or without."""
    if request.param == "keys":
        monkeypatch.setattr(guards, "_guards", lambda: None)
    query, key, value = (tensor.to("cuda" if request.param == "cuda" else "cpu") for tensor in tensors(SHAPE))
    arguments = query, key, value
    fast_path, served = FastPath(), Server()
    fast_path.add(OPTIONS, arguments, served)
    assert fast_path.find(OPTIONS, arguments) is served
    return fast_path, arguments, served


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
    known: Known, state: Callable[[str], AbstractContextManager[Any]]
) -> None:
    fast_path, arguments, served = known
    with state(arguments[0].device.type):
        assert fast_path.find(OPTIONS, arguments) is None
    assert fast_path.find(OPTIONS, arguments) is served


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_transforms_and_tracers_are_asked_for_in_every_call(known: Known) -> None:
    fast_path, arguments, _ = known
    seen: list[Any] = []

    def ask(tensor: Tensor) -> Tensor:
        seen.append(fast_path.find(OPTIONS, arguments))
        return tensor

    torch.vmap(ask)(torch.zeros(3))
    torch.func.grad(lambda tensor: ask(tensor).sum())(torch.zeros(3))
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
    known: Known, place: int, change: Callable[[Tensor], Tensor]
) -> None:
    fast_path, arguments, served = known
    changed = list(arguments)
    changed[place] = change(arguments[place])
    assert fast_path.find(OPTIONS, changed) is None
    assert fast_path.find(OPTIONS, arguments) is served


def test_options_count_and_gradients_where_they_are_recorded(known: Known) -> None:
    fast_path, (query, key, value), served = known
    assert fast_path.find(("a call", True, None), (query, key, value)) is None
    assert fast_path.find(OPTIONS, (query, key, value, None)) is None
    query.requires_grad_()
    recorded = Server()
    fast_path.add(OPTIONS, (query, key, value), recorded)
    assert fast_path.find(OPTIONS, (query, key, value)) is recorded
    with torch.no_grad():
        assert fast_path.find(OPTIONS, (query, key, value)) is None
        assert fast_path.find(OPTIONS, (query.detach(), key, value)) is served
    fast_path.clear()
    assert fast_path.find(OPTIONS, (query.detach(), key, value)) is None


@pytest.mark.parametrize("kinds", [2, 3 * MAX_GUARDS])
def test_kinds_that_take_turns_are_told_apart(known: Known, kinds: int) -> None:
    fast_path, (query, key, value), served = known
    calls = {Server(): (query[:, :, :length].clone(), key, value) for length in range(1, kinds)}
    for other, given in calls.items():
        fast_path.add(OPTIONS, given, other)
    for _ in range(3):
        assert fast_path.find(OPTIONS, (query, key, value)) is served
        assert [fast_path.find(OPTIONS, given) for given in calls.values()] == list(calls)
    assert all(len(guarded) <= MAX_GUARDS for guarded in fast_path._guarded.values())


def test_memory_that_is_not_aligned_is_a_kind_of_its_own(known: Known) -> None:
    fast_path, (query, key, value), served = known
    other, offset = Server(), query.new_empty(query.numel() + 1)[1:].view(query.shape)
    fast_path.add(OPTIONS, (offset, key, value), other)
    with torch.no_grad():  # which counts where a tensor requires a gradient
        assert fast_path.find(OPTIONS, (offset, key, value)) is other
    for _ in range(2):
        assert fast_path.find(OPTIONS, (offset, key, value)) is other
        assert fast_path.find(OPTIONS, (query, key, value)) is served


def test_one_tensor_in_several_places_and_inference_mode(known: Known) -> None:
    fast_path, (query, key, value), served = known
    same, made_there = Server(), Server()
    fast_path.add(OPTIONS, (query, query, value), same)
    with torch.inference_mode():
        made = query.clone()
        fast_path.add(OPTIONS, (made, key, value), made_there)
    for _ in range(2):
        assert fast_path.find(OPTIONS, (query, query, value)) is same
        assert fast_path.find(OPTIONS, (query, value, value)) is None
        with torch.inference_mode():
            assert fast_path.find(OPTIONS, (made, key, value)) is made_there
        assert fast_path.find(OPTIONS, (query, key, value)) is served


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_this_pytorch_has_the_guards(device: str) -> None:
    """Without them everything works, but takes twice as long."""
    assert guards._guards() is not None
    query, key, value = (tensor.to(device) for tensor in tensors(SHAPE))
    guard = guards.make_guard(query, key, value)
    assert guard(query, key, value)
    assert guard(query.clone(), key.clone(), value.clone())
    assert not guard(query, query, value)


def test_tensors_without_strides_are_asked_for_none(known: Known) -> None:
    """PyTorch's guards end the process when a tensor refuses to tell its strides."""
    fast_path, arguments, served = known
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
            assert fast_path.find(OPTIONS, changed) is None
            assert fast_path.find(OPTIONS, arguments) is served


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

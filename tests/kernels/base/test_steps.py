"""Launches of several kernels: what is passed the long way and the short one, workspaces, and layouts of gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from blocktune.kernels.base import steps
from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.base.steps import (
    MAX_LAYOUTS,
    PART_BYTES,
    BackwardLauncher,
    PreparedBackward,
    Step,
    Workspace,
    take_addresses,
)

pytestmark = pytest.mark.triton_free

Calls = list[tuple[Any, ...]]


class Function:
    """Stands for a jitted function: `function[grid](*arguments)` is written down, and the short way to it."""

    def __init__(self) -> None:
        self.long: Calls = []
        self.short: Calls = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> "Function":
            self.long.append((grid, arguments, options))
            return self

        return run


@pytest.fixture(params=[True, False], ids=["direct", "runner"])
def is_direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Compiled functions have a short way, straight to C or not."""

    def bound(compiled: Function, grid: Any, leading: Any, trailing: Any, descriptors: Any) -> Launch:
        return lambda *values: compiled.short.append((grid, (*values, *trailing), tuple(descriptors)))

    monkeypatch.setattr(steps, "can_pin", lambda compiled: True)
    monkeypatch.setattr(steps, "direct_of", bound if request.param else lambda *_: None)
    monkeypatch.setattr(steps, "launcher_of", bound)
    return bool(request.param)


def test_a_step_goes_the_long_way_once(is_direct: bool) -> None:
    function, described = Function(), ((1, lambda value: f"block of {value}"),)
    step = Step(function, (7,), ("rest",), {"num_warps": 4}, described, pins=True)
    assert not take_addresses(step)
    step("a", "b")
    step("c", "d")
    assert function.long == [((7, 1, 1), ("a", "block of b", "rest"), {"num_warps": 4})]
    assert function.short == [((7, 1, 1), ("c", "d", "rest"), described)]
    assert take_addresses(step) is is_direct


@pytest.mark.usefixtures("is_direct")
def test_a_step_that_does_not_pin_goes_the_long_way_always() -> None:
    function = Function()
    step = Step(function, (7, 2), (), {})
    for _ in range(3):
        step("a")
    assert len(function.long) == 3
    assert not function.short


def test_parts_of_a_workspace_are_apart_and_aligned() -> None:
    space = Workspace((3, torch.float32), (0, torch.int32), (1, torch.int32), (500, torch.bfloat16))
    memory = space.new(torch.device("cpu"))
    first, none, second, third = space.parts(memory, as_addresses=False)
    assert none is None
    assert [part.numel() for part in (first, second, third)] == [3, 1, 500]
    assert [part.dtype for part in (first, second, third)] == [torch.float32, torch.int32, torch.bfloat16]
    for part in (first, second, third):
        part.fill_(part.numel())
    assert [int(part.unique()) for part in (first, second, third)] == [3, 1, 500]
    addresses = space.parts(memory, as_addresses=True)
    assert addresses == [first.data_ptr(), None, second.data_ptr(), third.data_ptr()]
    assert all((address - memory.data_ptr()) % PART_BYTES == 0 for address in addresses if address is not None)


class Prepared(BackwardLauncher):
    """Writes down what was prepared and launched; rows of dout must be contiguous."""

    def __init__(self) -> None:
        self.prepared_for: Calls = []
        self.launched: list[tuple[int, tuple[Any, ...]]] = []

    def prepared(self, *arguments: Any, pins: bool) -> Launch:
        number = len(self.prepared_for)
        self.prepared_for.append((*arguments, pins))
        return lambda *others: self.launched.append((number, others))


def gradients(dout: torch.Tensor, out: torch.Tensor | None = None) -> list[torch.Tensor]:
    """q, k, v, out, lse, dout, dq, dk and dv."""
    q, lse = torch.empty(1, 2, 8, 16), torch.empty(1, 2, 8)
    return [q, q, q, q if out is None else out, lse, dout, q, q, q]


def test_each_layout_of_a_gradient_has_a_launch() -> None:
    bound, dense = Prepared(), torch.empty(1, 2, 8, 16)
    turned = torch.empty(1, 8, 2, 16).transpose(1, 2)
    launch = bound.pinned(*gradients(dense), 0.5)
    assert isinstance(launch, PreparedBackward)
    assert [number for number, _ in bound.launched] == [0, 0]  # the long way and the short one
    assert bound.prepared_for[0][-1] is True
    shifted = torch.empty(1 + dense.numel())[1:].view(dense.shape)
    for dout in (turned, dense, shifted, turned, dense.half(), dense):
        launch(*gradients(dout), 0.5)
    assert [number for number, _ in bound.launched[2:]] == [1, 0, 2, 1, 3, 0]
    launch(*gradients(dense, out=turned), 0.5)
    assert bound.launched[-1][0] == 4
    assert bound.launched[-1][1][-1] == 0.5


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_hooks_have_restored_in_another_layout_has_a_launch_of_its_own(place: int) -> None:
    """`torch.autograd.graph.save_on_cpu` brings dense tensors back, whatever layout those of the forward had."""
    bound, dense = Prepared(), torch.empty(1, 2, 8, 16)
    launch = bound.pinned(*gradients(dense), 0.5)
    padded, shifted = torch.empty(1, 2, 8, 20)[..., :16], torch.empty(1 + dense.numel())[1:].view(dense.shape)
    for restored in (padded, dense, shifted, padded):
        given = gradients(dense)
        given[place] = restored
        launch(*given, 0.5)
    assert [number for number, _ in bound.launched[2:]] == [1, 0, 2, 1]


def test_a_gradient_that_does_not_fit_is_copied_every_time() -> None:
    bound, dense = Prepared(), torch.empty(1, 2, 8, 16)
    launch = bound.pinned(*gradients(dense), 0.5)
    for value in (1.0, 2.0):
        launch(*gradients(torch.tensor(value).expand(dense.shape)), 0.5)
        number, arguments = bound.launched[-1]
        assert number == 0
        assert arguments[5].stride() == dense.stride()
        assert torch.equal(arguments[5], torch.full_like(dense, value))
    assert len(bound.prepared_for) == 1
    bound(*gradients(torch.tensor(3.0).expand(dense.shape)), 0.5)
    assert bound.launched[-1][1][5].is_contiguous()
    assert bound.prepared_for[-1][-1] is False


def test_launches_for_layouts_do_not_pile_up() -> None:
    bound = Prepared()
    launch = bound.pinned(*gradients(torch.empty(1, 2, 8, 16)), 0.5)
    assert isinstance(launch, PreparedBackward)
    for padding in range(3 * MAX_LAYOUTS):
        launch(*gradients(torch.empty(1, 2, 8, 16 + padding)[..., :16]), 0.5)
        assert len(launch._launches) <= MAX_LAYOUTS

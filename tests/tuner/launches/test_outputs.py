"""Whether results of configs agree, on arguments as programs have them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.tuner.launches import outputs
from blocktune.tuner.launches.outputs import OutputCheck
from tests.support.fakes.fake_call import FIRST, OTHER, fake_call

pytestmark = pytest.mark.triton_free


def problem_of(call: AutotunedCall) -> str | None:
    """What is wrong with the results of the second config."""
    check = OutputCheck(call)
    assert check.problem(call, FIRST) is None
    return check.problem(call, OTHER)


def copied(out: Tensor, x: Tensor, BLOCK: int) -> None:
    with torch.no_grad():
        out.copy_(x)


def off_by(amount: float) -> Callable[..., None]:
    def effect(out: Tensor, x: Tensor, BLOCK: int) -> None:
        out.copy_(x.float() + amount * (BLOCK - 1))

    return effect


def test_an_input_of_autograd_is_restored_without_a_trace() -> None:
    x = torch.randn(8, requires_grad=True)
    loss = (x * x).sum()  # keeps x for its backward pass
    call = fake_call(copied, out=torch.empty(8), x=x)
    assert problem_of(call) is None
    loss.backward()
    assert torch.equal(x.grad, 2 * x)


def test_expanded_and_empty_tensors_are_restored() -> None:
    for x in (torch.randn(1).expand(8), torch.empty(0)):
        call = fake_call(copied, out=torch.empty(x.shape), x=x)
        assert problem_of(call) is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64])
def test_types_have_their_own_tolerance(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "_CHUNK", 10)
    x = torch.full((64,), 2.0)
    for amount, agrees in ((0.0, True), (1.0, False)):
        call = fake_call(off_by(amount), out=torch.empty(64).to(dtype), x=x)
        problem = problem_of(call)
        assert (problem is None) is agrees
    assert problem == "`out` differs from what the first config computes by 5.0e-01"


def test_what_is_not_finite_must_be_so_in_both() -> None:
    for values, agrees in (([1.0, float("nan")], True), ([float("inf"), 1.0], False)):
        call = fake_call(
            lambda out, x, BLOCK: out.copy_(x if BLOCK == 2 else torch.tensor([1.0, float("nan")])),
            out=torch.empty(2),
            x=torch.tensor(values),
        )
        assert (problem_of(call) is None) is agrees


def test_what_timed_launches_have_added_up_is_in_no_check() -> None:
    call = fake_call(lambda out, x, BLOCK: out.add_(x), out=torch.zeros(4), x=torch.ones(4))
    check = OutputCheck(call)
    assert check.problem(call, FIRST) is None
    call.named["out"].fill_(7.0)
    assert check.problem(call, OTHER) is None
    assert torch.equal(call.named["out"], torch.zeros(4))

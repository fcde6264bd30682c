"""Whether results of configs agree, on arguments as programs have them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune.kernels.tuned.config import UserConfig
from blocktune.tuner.turns import outputs
from blocktune.tuner.turns.outputs import OutputCheck

pytestmark = pytest.mark.triton_free

FIRST, OTHER = (UserConfig("m:f", (("BLOCK", block),)) for block in (1, 2))


def call_of(effect: Callable[..., None], **arguments: Tensor) -> Any:
    """A call whose launch does this to its arguments, by the block."""

    def no_hook(named: Any, **_: Any) -> None:
        """Do nothing."""

    def config(block: int) -> Any:
        return SimpleNamespace(pre_hook=None, all_kwargs=lambda: {"BLOCK": block})

    tuner = SimpleNamespace(fn=SimpleNamespace(run=effect), pre_hook=no_hook, post_hook=no_hook)
    configs = {FIRST: config(1), OTHER: config(2)}
    return SimpleNamespace(
        tuner=tuner, configs=configs, default=FIRST, named=arguments, args=tuple(arguments.values()), kwargs={}
    )


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
    call = call_of(copied, out=torch.empty(8), x=x)
    assert OutputCheck(call).problem(call, OTHER) is None
    loss.backward()
    assert torch.equal(x.grad, 2 * x)


def test_expanded_and_empty_tensors_are_restored() -> None:
    for x in (torch.randn(1).expand(8), torch.empty(0)):
        call = call_of(copied, out=torch.empty(x.shape), x=x)
        assert OutputCheck(call).problem(call, OTHER) is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64])
def test_types_have_their_own_tolerance(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "_CHUNK", 10)
    x = torch.full((64,), 2.0)
    for amount, agrees in ((0.0, True), (1.0, False)):
        call = call_of(off_by(amount), out=torch.empty(64).to(dtype), x=x)
        problem = OutputCheck(call).problem(call, OTHER)
        assert (problem is None) is agrees
    assert problem == "`out` differs from what the first config computes by 5.0e-01"


def test_what_is_not_finite_must_be_so_in_both() -> None:
    for values, agrees in (([1.0, float("nan")], True), ([float("inf"), 1.0], False)):
        call = call_of(
            lambda out, x, BLOCK: out.copy_(x if BLOCK == 2 else torch.tensor([1.0, float("nan")])),
            out=torch.empty(2),
            x=torch.tensor(values),
        )
        assert (OutputCheck(call).problem(call, OTHER) is None) is agrees

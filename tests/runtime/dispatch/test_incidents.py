"""An error of our own on the way to a kernel: PyTorch computes the call, and people hear of it."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune.kernels.files import incidents
from blocktune.kernels.values.errors import StoreError, UsageError
from blocktune.runtime.dispatch import resolver
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.snapshot import Snapshot
from blocktune.runtime.dispatch.torch_attention import scaled_dot_product_attention
from blocktune.runtime.selection import canary
from blocktune.runtime.selection.ladder import Rung
from tests.support.fakes.dispatch_fakes import ListSource, PlainKernel, pretend_h200, shape_like, tensors

pytestmark = pytest.mark.triton_free

DEPENDENCIES: dict[str, tuple[Any, str]] = {
    "the table of configs": (Snapshot, "table"),
    "the ladder": (resolver, "climb_down"),
    "the registry": (resolver, "get_kernel"),
    "the kernel's layout": (PlainKernel, "layout_problem"),
    "memory for a trial": (resolver.LaunchTrial, "of"),
    "the kind of a failure": (resolver.LaunchTrial, "kind"),
    "the first use": (canary, "problem_of"),
    "the explanation": (resolver, "explain_candidate"),
    "the plan": (resolver, "KernelPlan"),
    "the counting of misses": (resolver, "watch"),
}
ERRORS = (UsageError("no switch"), StoreError("no store"), KeyError("x"), RecursionError(), MemoryError(), OSError(28))


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    pretend_h200(monkeypatch)
    yield
    incidents.counts.clear()


def failing(error: Exception) -> Any:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def expected(given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return scaled_dot_product_attention(*given)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("dependency", DEPENDENCIES)
def test_attention_is_right_whatever_fails_on_the_way(
    dependency: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*DEPENDENCIES[dependency], failing(error))
    dispatcher, given = Dispatcher(ListSource()), tensors(shape_like(32))
    for _ in range(2):
        torch.testing.assert_close(dispatcher(*given), expected(given))
    explanation = dispatcher.explain(*given)
    assert explanation.rung is Rung.SDPA
    assert type(error).__name__ in explanation.reason
    assert incidents.counts.total() == 1


def test_gradients_are_right_where_the_backward_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "climb_down", failing(TypeError("wrong")))
    given = tuple(tensor.requires_grad_() for tensor in tensors(shape_like(32)))
    found = torch.autograd.grad(Dispatcher(ListSource())(*given).sum(), given)
    wanted = torch.autograd.grad(expected(given).sum(), given)
    torch.testing.assert_close(found, wanted)


def test_an_error_is_logged_and_stored_once_and_counted_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resolver, "climb_down", failing(TypeError("a\x1b[31m number")))
    dispatcher = Dispatcher(ListSource())
    for length in (32, 48, 64):
        dispatcher(*tensors(shape_like(length)))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    (text,) = incidents.counts
    assert text.startswith("TypeError: a\\x1b[31m number (test_incidents.py:")
    assert text in warning
    assert incidents.counts[text] == 3
    (stored,) = incidents.stored_incidents()
    assert (stored.error, stored.shape) == (text, shape_like(32).label)


def test_an_explanation_of_a_shape_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "climb_down", failing(TypeError("wrong")))
    explanation = Dispatcher(ListSource()).explain(shape_like(32))
    assert explanation.rung is Rung.SDPA
    assert explanation.warnings == (explanation.reason,)


def test_a_place_that_cannot_be_written_costs_no_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "blocktune").touch()  # where the directory would be
    monkeypatch.setattr(resolver, "climb_down", failing(TypeError("wrong")))
    given = tensors(shape_like(32))
    with caplog.at_level(logging.INFO, "blocktune"):
        torch.testing.assert_close(Dispatcher(ListSource())(*given), expected(given))
    assert "An incident is not stored" in caplog.text
    assert incidents.stored_incidents() == []


def test_a_place_that_cannot_be_found_costs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise PermissionError("the state directory")

    monkeypatch.setattr(incidents, "incidents_path", fail)
    assert "an error" in incidents.reason_of(_raised("an error"), shape_like(32))


def _raised(text: str) -> Exception:
    try:
        raise TypeError(text)
    except TypeError as error:
        return error


def test_memory_that_the_call_lacks_is_no_incident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver.LaunchTrial, "of", failing(torch.OutOfMemoryError("no memory")))
    with pytest.raises(torch.OutOfMemoryError):
        Dispatcher(ListSource())(*tensors(shape_like(32)))

"""Work of a thread of its own: its results, its errors, and what it has enqueued by then."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware import side_thread
from blocktune.kernels.hardware.side_thread import relaxed_capture, run_on_side_thread

pytestmark = pytest.mark.triton_free


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device without a GPU, and when its stream is waited for."""
    found: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: found.append("waited"))
    monkeypatch.setattr(side_thread, "load_library", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return found


def test_results_come_back_and_modes_of_the_caller_do_not_hold(waited: list[str]) -> None:
    with torch.inference_mode():
        made = run_on_side_thread(lambda: torch.zeros(2), "cuda")
    assert not made.is_inference()
    assert waited == ["waited"]


def test_an_error_comes_back_after_its_stream_was_waited_for(waited: list[str]) -> None:
    def task() -> None:
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        run_on_side_thread(task, "cuda")
    assert waited == ["waited"]


def test_captures_of_other_threads_are_no_obstacle_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []

    def exchange(mode: Any) -> int:
        modes.append(mode._obj.value)
        mode._obj.value = 0
        return 0

    monkeypatch.setattr(
        side_thread, "load_library", lambda: SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    )
    with relaxed_capture():
        assert modes == [2]
    assert modes == [2, 0]  # as it was before

"""Triton's key is found once, ahead of the launch that needs it."""

import threading

import pytest
import triton.runtime.cache

from blocktune.runtime.dispatch.launches import triton_key
from tests.support.triton_modes import compiled_here

pytestmark = compiled_here


def test_a_launch_waits_for_the_key_that_a_thread_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    found, go_on = [], threading.Event()

    def find() -> str:
        go_on.wait(10)
        found.append(threading.current_thread().name)
        return "key"

    monkeypatch.setattr(triton.runtime.cache, "triton_key", find)
    monkeypatch.setattr(triton_key, "_finding", None)
    triton_key.await_triton_key()  # nothing has begun
    for _ in range(2):
        triton_key.begin_triton_key()
    threading.Timer(0.05, go_on.set).start()
    triton_key.await_triton_key()
    assert found == ["blocktune-triton-key"]


def test_an_error_is_left_to_the_launch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def find() -> str:
        raise OSError("no such file")

    monkeypatch.setattr(triton.runtime.cache, "triton_key", find)
    monkeypatch.setattr(triton_key, "_finding", None)
    triton_key.begin_triton_key()
    triton_key.await_triton_key()
    assert capsys.readouterr().err == ""

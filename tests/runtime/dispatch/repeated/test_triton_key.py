"""Triton's key is found once, ahead of the launch that needs it, and remembered by later processes."""

import os
import threading
from pathlib import Path

import pytest
import triton.runtime.cache

from blocktune.runtime.dispatch.launches import triton_key
from tests.support.triton_modes import compiled_here

pytestmark = compiled_here


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a process that has asked for no key yet, in a cache that is not there yet."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(triton_key, "_finding", None)
    return tmp_path / "cache" / triton_key.FILE


def key_of_a_process(monkeypatch: pytest.MonkeyPatch, computed: str) -> str:
    """The key that a launch gets in a new process, in which Triton would compute this one."""
    monkeypatch.setattr(triton.runtime.cache, "triton_key", lambda: computed)
    monkeypatch.setattr(triton_key, "_finding", None)
    triton_key.begin_triton_key()
    triton_key.await_triton_key()
    return triton.runtime.cache.triton_key()


def test_a_launch_waits_for_the_key_that_a_thread_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    found, go_on = [], threading.Event()

    def find() -> str:
        go_on.wait(10)
        found.append(threading.current_thread().name)
        return "key"

    monkeypatch.setattr(triton.runtime.cache, "triton_key", find)
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
    triton_key.begin_triton_key()
    triton_key.await_triton_key()
    assert capsys.readouterr().err == ""


def test_a_later_process_remembers_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key_of_a_process(monkeypatch, "first") == "first"
    assert key_of_a_process(monkeypatch, "second") == "first"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"state": 1}', '{"state": "other", "key": "old"}'])
def test_what_is_damaged_or_of_other_files_is_found_anew(
    file: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.parent.mkdir()
    file.write_text(content)
    assert key_of_a_process(monkeypatch, "new") == "new"
    assert key_of_a_process(monkeypatch, "newer") == "new"


def test_every_change_of_tritons_files_is_seen(tmp_path: Path) -> None:
    for name in ("_C/libtriton.so", "runtime/cache.py", "language/core.py", "backends/nvidia/compiler.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    states = [triton_key._state_of_triton(tmp_path)]
    for place in list(tmp_path.rglob("*.*")):
        times = place.stat()
        place.write_text("two")  # as long, and with the time of the other one
        os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))
        states.append(triton_key._state_of_triton(tmp_path))
    assert len(set(states)) == len(states) == 5

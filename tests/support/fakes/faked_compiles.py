"""The environment in which worker processes compile with `compile_fakes`, and say which processes they were."""

import os
from pathlib import Path
from typing import Any

import pytest

from tools import ROOT


def faked_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Prepare the processes that are started from now on, and return the module of the fakes."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("BLOCKTUNE_TEST_PID", str(os.getpid()))
    monkeypatch.setenv("BLOCKTUNE_TEST_PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from tests.support.fakes import compile_fakes

    return compile_fakes

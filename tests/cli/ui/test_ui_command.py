"""`tune ui` as a process: it prints its address, serves, ends by Ctrl-C, and names what is missing."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from blocktune.cli.main import INTERRUPTED
from tests.support.stores.live_servers import live_server
from tools import ROOT


def test_it_prints_its_address_and_serves_until_ctrl_c(db: Path) -> None:
    pytest.importorskip("fastapi", reason="`tune ui` needs fastapi")
    pytest.importorskip("vl_convert", reason="`tune ui` needs vl_convert")
    command = [sys.executable, "-P", "-m", "blocktune", "ui", "--db", str(db), "--json"]
    before = db.read_bytes()
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(4)]
            url = json.loads("".join(lines))["url"]
            with urllib.request.urlopen(url, timeout=60) as answer:
                assert b"<h1>blocktune live</h1>" in answer.read()
        finally:
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert "Traceback" not in errors
    assert "Open this address in a browser of this machine" in errors
    assert db.read_bytes() == before


class SlowCompiler:
    """Prepares for as long as a test says."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def prepare(self) -> None:
        self.begun.set()
        self.goes_on.wait(60)


def test_the_process_waits_for_an_import_that_the_server_has_begun(db: Path) -> None:
    """Python aborts where a thread is cut off while it imports PyTorch."""
    compiler = SlowCompiler()
    with live_server(db, what_ifs=compiler):
        assert compiler.begun.wait(60)
        (thread,) = [each for each in threading.enumerate() if each.name == "blocktune-ui" and not each.daemon]
        compiler.goes_on.set()
    assert not thread.is_alive()


def test_a_server_that_ended_begins_no_further_step() -> None:
    pytest.importorskip("uvicorn", reason="`tune ui` needs uvicorn")
    from blocktune.cli.ui.server import _prepare

    done: list[int] = []
    _prepare([lambda: done.append(1), lambda: done.append(2)], lambda: bool(done))
    assert done == [1]


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_a_library_that_is_missing_is_named_with_the_way_to_get_it(
    tune: Any, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("altair", "vl_convert", "fastapi", "uvicorn"):
        monkeypatch.setitem(sys.modules, name, None if name == missing else ModuleType(name))
    result = tune("ui")
    assert result.exit_code == 2
    assert f"{missing} is not installed" in result.stderr
    assert 'pip install "blocktune[ui]"' in result.stderr


def test_places_that_hold_nothing_are_refused(tune: Any, tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="`tune ui` needs fastapi")
    pytest.importorskip("vl_convert", reason="`tune ui` needs vl_convert")
    result = tune("ui", tmp_path / "missing.json")
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr

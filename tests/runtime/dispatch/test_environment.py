"""Whatever the variables of the environment hold, torch is imported and attention is right."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.kernels.files import variables
from blocktune.kernels.files.variables import AUTOTUNE, VARIABLES
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.torch_attention import scaled_dot_product_attention
from tests.support.fakes.dispatch_fakes import pretend_h200, shape_like, tensors
from tests.support.stores.odd_values import KINDS, odd_value
from tools import program

pytestmark = pytest.mark.triton_free


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autotune", ["1 ", None])
def test_a_process_of_odd_variables_computes_attention(kind: str, autotune: str | None, tmp_path: Path) -> None:
    """PyTorch calls the entry point at its import where blocktune is installed."""
    value = odd_value(tmp_path, kind)
    environment = os.environ | dict.fromkeys(VARIABLES, value) | {"XDG_STATE_HOME": str(tmp_path / "state")}
    environment |= {} if autotune is None else {AUTOTUNE.name: autotune}
    command = program("stores.odd_first_calls")
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, env=environment, cwd=tmp_path
    )
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@pytest.mark.few(64)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VARIABLES)
def test_each_odd_variable_leaves_attention_right(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some values are names of files
    monkeypatch.setenv(name, odd_value(tmp_path, kind))
    kernel, given = pretend_h200(monkeypatch), tensors(shape_like(32))
    for strict in (False, True):
        dispatcher = Dispatcher(strict=strict)
        for _ in range(2):
            torch.testing.assert_close(dispatcher(*given), scaled_dot_product_attention(*given))
    assert len(kernel.launched) == 3  # a trial and two calls


def test_a_later_call_reads_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    class Environment(dict[str, str]):
        reads = 0

        def get(self, name: str, default: Any = None) -> Any:
            Environment.reads += 1
            return super().get(name, default)

    pretend_h200(monkeypatch)
    monkeypatch.setattr(variables.os, "environ", Environment(os.environ))
    dispatcher, given = Dispatcher(), tensors(shape_like(32))
    dispatcher(*given)
    assert Environment.reads > 0
    Environment.reads = 0
    for _ in range(3):
        dispatcher(*given)
    assert Environment.reads == 0

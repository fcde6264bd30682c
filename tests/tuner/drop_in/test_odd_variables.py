"""Whatever the variables of the environment hold, an autotuned launch gets its best config."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blocktune.db.store import ResultStore
from blocktune.kernels.files.variables import FROZEN_KERNELS, STRICT, VARIABLES
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.frozen import load_frozen
from blocktune.runtime.autotuned.summary import keep_launches
from blocktune.tuner.drop_in import tune_call
from tests.support.fakes.fake_triton import FakeGpu
from tests.support.stores.odd_values import FILES, KINDS, odd_file, odd_value
from tests.support.triton_modes import compiled_here
from tests.tuner.drop_in.conftest import decorated, grid

pytestmark = compiled_here


@pytest.fixture(autouse=True)
def stores_of_the_environment(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = replace(tune_call.machine(), open_store=lambda seconds: ResultStore.open(lock_timeout_seconds=seconds))
    monkeypatch.setattr(tune_call, "machine", lambda: tools)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def launch(gpu: FakeGpu) -> tuple[int, int]:
    """Launch a kernel twice; returns the block and the warps that it got."""
    kernel, x = decorated(), torch.ones(1000)
    for _ in range(2):
        kernel[grid](x, 1000, 2.0)
    return gpu.launches[-1].arguments["BLOCK"], gpu.launches[-1].num_warps


@pytest.mark.few(8)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VARIABLES)
def test_each_odd_variable_leaves_a_launch_right(
    name: str, kind: str, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, odd_value(tmp_path, kind))
    assert launch(gpu) == (256, 2)
    keep_launches()


@pytest.mark.few(6)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_all_odd_variables_leave_a_launch_right(
    kind: str, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = odd_value(tmp_path, kind)
    for name in VARIABLES:
        monkeypatch.setenv(name, value)
    assert launch(gpu) == (256, 2)
    keep_launches()


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", FILES)
def test_a_frozen_file_that_cannot_be_taken_is_one_warning_and_an_error_where_it_is_asked_for(
    kind: str, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = odd_file(tmp_path, kind)
    monkeypatch.setenv(FROZEN_KERNELS.name, str(path))
    assert launch(gpu) == (256, 2)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert str(path) in warning
    with pytest.raises(UsageError, match=kind):
        load_frozen(path)


def test_a_strict_kernel_without_its_frozen_file_says_what_is_missing(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FROZEN_KERNELS.name, str(tmp_path / "missing.json"))
    monkeypatch.setenv(STRICT.name, " 1 ")
    with pytest.raises(UsageError, match="is strict"):
        launch(gpu)
    assert gpu.launches == []

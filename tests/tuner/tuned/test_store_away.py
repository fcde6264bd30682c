"""Kernels that are tuned while their store is away, or is only being made."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.db.user_store import UserKernelStore
from blocktune.kernels.tuned.frozen import known_document
from blocktune.kernels.tuned.kernel import forget_choices
from blocktune.tuner.tuned import tune_call
from blocktune.tuner.tuned.autotune import autotune
from tests.support.fakes.fake_triton import FakeGpu
from tests.support.libraries.autotuned_kernels import CONFIGS, scale_kernel
from tests.support.triton_modes import compiled_here
from tests.tuner.tuned.conftest import H200

pytestmark = compiled_here


def test_a_store_that_is_away_costs_a_warning(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tools = tune_call.machine()
    away = tune_call.Tools(
        compiler=tools.compiler, open_store=lambda: UserKernelStore.open("/dev/null/x.db"), make_clock=tools.make_clock
    )
    monkeypatch.setattr(tune_call, "machine", lambda: away)
    kernel = autotune(CONFIGS, ["n"])(scale_kernel.fn)
    with caplog.at_level(logging.WARNING, "blocktune"):
        kernel[(4,)](torch.ones(1000), 1000, 2.0)
    assert kernel.best_config.kwargs == {"BLOCK": 256}
    assert "are not kept" in caplog.text
    (row,) = known_document(H200)["kernels"]  # which is what other ranks are sent
    assert json.loads(row["config"])["BLOCK"] == 256
    gpu.timed.clear()
    forget_choices()
    kernel[(4,)](torch.ones(1000), 1000, 2.0)
    assert not gpu.timed


def test_a_list_of_which_nothing_is_known_is_compiled_while_the_store_is_made(
    gpu: FakeGpu, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, compiling = tune_call.machine(), threading.Event()
    compile_list = tools.compiler.compile

    def compile_and_say(*arguments: Any) -> Any:
        compiling.set()
        return compile_list(*arguments)

    def open_meanwhile() -> UserKernelStore:
        assert compiling.wait(60)
        return UserKernelStore.open(path)

    monkeypatch.setattr(tools.compiler, "compile", compile_and_say)
    slow = tune_call.Tools(compiler=tools.compiler, open_store=open_meanwhile, make_clock=tools.make_clock)
    monkeypatch.setattr(tune_call, "machine", lambda: slow)
    kernel = autotune(CONFIGS, ["n"])(scale_kernel.fn)
    kernel[(4,)](torch.ones(1000), 1000, 2.0)
    assert kernel.best_config.kwargs == {"BLOCK": 256}

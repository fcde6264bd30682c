"""Kernels that are tuned while their store is away, or is only being made."""

import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.db.records.records import Outcome
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.runtime.autotuned.frozen import known_rows
from blocktune.runtime.autotuned.kernel import forget_choices
from blocktune.tuner.compile.answers import Compiled, is_of_the_machine
from blocktune.tuner.drop_in import tune_call
from blocktune.tuner.drop_in.autotune import autotune
from blocktune.tuner.subject.launch import LaunchSubject
from tests.support.fakes.fake_triton import FakeGpu
from tests.support.libraries.autotuned_kernels import CONFIGS, scale_kernel
from tests.support.triton_modes import compiled_here
from tests.tuner.drop_in.conftest import H200, measured

pytestmark = compiled_here


def test_a_store_that_is_away_costs_a_warning(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tools = tune_call.machine()
    away = replace(tools, open_store=lambda _: ResultStore.open("/dev/null/x.db"))
    monkeypatch.setattr(tune_call, "machine", lambda: away)
    kernel = autotune(CONFIGS, ["n"])(scale_kernel.fn)
    with caplog.at_level(logging.WARNING, "blocktune"):
        kernel[(4,)](torch.ones(1000), 1000, 2.0)
    assert kernel.best_config.kwargs == {"BLOCK": 256}
    assert "is launched without a store of its results, which failed: StoreError" in caplog.text
    (row,) = known_rows(H200)  # which is what other ranks are sent
    assert json.loads(row["config"])["BLOCK"] == 256
    gpu.timed.clear()
    forget_choices()
    kernel[(4,)](torch.ones(1000), 1000, 2.0)
    assert not gpu.timed


def test_a_list_of_which_nothing_is_known_is_compiled_while_the_store_is_made(
    gpu: FakeGpu, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, compiling = tune_call.machine(), threading.Event()
    compile_list = tools.ahead.compile

    def compile_and_say(*arguments: Any) -> Any:
        compiling.set()
        return compile_list(*arguments)

    def open_meanwhile(lock_timeout_seconds: float) -> ResultStore:
        assert compiling.wait(60)
        return ResultStore.open(path)

    monkeypatch.setattr(tools.ahead, "compile", compile_and_say)
    slow = replace(tools, open_store=open_meanwhile)
    monkeypatch.setattr(tune_call, "machine", lambda: slow)
    kernel = autotune(CONFIGS, ["n"])(scale_kernel.fn)
    kernel[(4,)](torch.ones(1000), 1000, 2.0)
    assert kernel.best_config.kwargs == {"BLOCK": 256}


def test_where_the_machine_stops_every_config_the_advice_is_about_the_machine(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Compiled(outcome=Outcome.COMPILE_ERROR, error="OSError: [Errno 28] No space left", transient=True)
    monkeypatch.setattr(tune_call, "compiles", lambda subject, configs, *tools: dict.fromkeys(configs, full))
    with pytest.raises(NoFeasibleConfigError, match=r"No space left.* Make room on the disks") as caught:
        autotune(CONFIGS, ["n"])(scale_kernel.fn)[(4,)](torch.ones(1000), 1000, 2.0)
    assert "Correct the kernel" not in str(caught.value)


@pytest.mark.parametrize("code", ["-9", "137"])
def test_a_compiler_that_was_killed_says_nothing_of_its_config(code: str) -> None:
    """Also where a script around `ptxas` tells its signal as shells do."""
    assert is_of_the_machine(RuntimeError(f"PTXAS error: `ptxas` failed with error code {code}"))
    assert not is_of_the_machine(RuntimeError("PTXAS error: `ptxas` failed with error code 255"))


def test_what_a_full_disk_stopped_is_tried_again_by_the_next_process(
    gpu: FakeGpu, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The fastest config finds no space for its code, and the next process has the rest of the disk."""
    full = Compiled(outcome=Outcome.COMPILE_ERROR, error="OSError: [Errno 28] No space left", transient=True)

    def compile_others(
        subject: LaunchSubject, configs: Sequence[LaunchConfig], *tools: Any
    ) -> dict[LaunchConfig, Compiled | None]:
        return {config: full if config.parameters["BLOCK"] == 256 else None for config in configs}

    with monkeypatch.context() as patched:
        patched.setattr(tune_call, "compiles", compile_others)
        kernel = autotune(CONFIGS, ["n"])(scale_kernel.fn)
        with caplog.at_level(logging.WARNING, "blocktune"):
            kernel[(4,)](torch.ones(1000), 1000, 2.0)
    assert kernel.best_config.kwargs != {"BLOCK": 256}
    assert "tried again by the next process: OSError" in caplog.text
    assert 256 not in {block for block, _ in measured(gpu)}
    with ResultStore.open(path) as store:
        assert store.kernel_bests() == []
    forget_choices()
    again = autotune(CONFIGS, ["n"])(scale_kernel.fn)
    again[(4,)](torch.ones(1000), 1000, 2.0)
    assert again.best_config.kwargs == {"BLOCK": 256}
    assert {block for block, _ in measured(gpu)} > {256}, "and the best of those that were measured before"
    with ResultStore.open(path) as store:
        assert [best.config.parameters["BLOCK"] for best in store.kernel_bests()] == [256]

"""Candidates in a process of their own: what they break is theirs."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from blocktune.db.records.records import Outcome
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import BlocktuneError, UsageError
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.runtime.autotuned.settings import Settings
from blocktune.tuner.compile.child_process import ChildLostError
from blocktune.tuner.drop_in import tune_call
from blocktune.tuner.drop_in.autotune import autotune
from blocktune.tuner.drop_in.install import install
from blocktune.tuner.launches import launch_runner
from blocktune.tuner.launches.arguments import load_arguments, save_arguments
from blocktune.tuner.launches.launch_runner import LaunchRunner, cause_of
from blocktune.tuner.launches.measure_worker import LaunchCommands
from blocktune.tuner.measure.worker_process import Deadlines, LocalWorker
from tests.support.fakes.fake_triton import FakeGpu
from tests.support.libraries.autotuned_kernels import CONFIGS, scale_kernel
from tests.support.triton_modes import compiled_here
from tools import program

pytestmark = compiled_here


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


@pytest.mark.exhaustive
def test_a_config_that_crashes_or_hangs_costs_itself(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = replace(
        tune_call.machine(),
        command=program("workers.fake_measure_worker"),
        deadlines=Deadlines(compiling=12.0),  # a busy machine takes seconds to load what launches
    )
    monkeypatch.setattr(tune_call, "machine", lambda: tools)
    scale_kernel.cache.clear()
    install(settings=Settings(isolate=True))
    x = torch.ones(1000)
    scale_kernel[grid](x, 1000, 2.0)
    assert len(gpu.launches) == 1  # nothing was measured here
    (choice,) = scale_kernel._blocktune_kernel[1].choices.values()
    assert (choice.launched.kwargs["BLOCK"], choice.launched.num_warps, choice.time_us) == (256, 2, 106.0)
    reasons = {label.partition(" ")[2]: reason for label, reason in choice.dropped.items()}
    assert "SIGABRT" in reasons["BLOCK=512 num_stages=3 num_warps=4"]
    assert "no answer within 12 s" in reasons["BLOCK=512 num_stages=3 num_warps=2"]


class FullDisk(LaunchCommands):
    """Those of a child on a machine without space."""

    def __init__(self) -> None:
        bench: Any = SimpleNamespace(synchronize=lambda: None, close=lambda: None)
        super().__init__(lambda call, terms: bench, lambda document: document, LaunchConfig.from_json)

    def run(self, *_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_machine_that_fails_disqualifies_no_config(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr(launch_runner, "WorkerProcess", lambda command, environment: LocalWorker(FullDisk()))
    scale_kernel.cache.clear()
    install(settings=Settings(isolate=True))
    with pytest.raises(BlocktuneError, match=r"the machine failed: OSError: .*No space left.* Free space on the disk"):
        scale_kernel[grid](torch.ones(1000), 1000, 2.0)
    with ResultStore.open(path) as store:
        assert store.kernel_bests() == []


def test_a_lost_child_is_known_by_its_last_error() -> None:
    said = (
        "died\n  in synchronize\ntorch.AcceleratorError: CUDA error: an illegal memory access\nSearch for `cudaError`"
    )
    assert cause_of(ChildLostError(said)) == "torch.AcceleratorError: CUDA error: an illegal memory access"
    assert cause_of(ChildLostError("no answer within 60 s")) == "no answer within 60 s"


def test_what_cannot_travel_is_refused(gpu: FakeGpu, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"argument 0 is a list\. Tune this kernel without `isolate`"):
        save_arguments([[1]], {}, tmp_path)

    @autotune(CONFIGS, ["n"], isolate=True)
    @triton.jit
    def local(x, n, BLOCK: triton.language.constexpr):
        triton.language.store(x, n)

    with pytest.raises(UsageError, match=r"must import the kernel, but .*local is in a script"):
        local[(1,)](torch.ones(1), 1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(4, 6),
        torch.arange(24).reshape(4, 6).T,
        torch.arange(24, dtype=torch.bfloat16)[1:].unfold(0, 4, 2),
        torch.arange(24.0)[::3],
        torch.ones(5).expand(3, 5),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.tensor(5),
    ],
)
def test_arguments_arrive_as_they_were(tmp_path: Path, tensor: torch.Tensor) -> None:
    description = save_arguments([tensor, 3], {"scale": 0.5, "bias": None}, tmp_path)
    (found, three), named = load_arguments(description, tmp_path)
    assert (three, named) == (3, {"scale": 0.5, "bias": None})
    assert torch.equal(found, tensor)
    assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())
    assert found.numel() == 0 or found.data_ptr() % 16 == tensor.data_ptr() % 16


@pytest.mark.exhaustive
def test_a_runner_replaces_a_child_that_a_config_has_cost(gpu: FakeGpu) -> None:
    kernel = autotune(CONFIGS, ["n"], restore_value=["x"], isolate=True)(scale_kernel.fn).kernel
    call = kernel.call_of((torch.ones(1000), 1000, 2.0), {"grid": grid, "warmup": False})
    deadlines = Deadlines(compiling=30.0, running=30.0)
    runner = LaunchRunner(call, command=program("workers.fake_measure_worker"), deadlines=deadlines)
    by_block = {(config.parameters["BLOCK"], config.parameters["num_warps"]): config for config in call.configs}
    try:
        crashed = runner.measure(by_block[512, 4])
        assert (crashed.outcome, "SIGABRT" in crashed.error) == (Outcome.RUN_ERROR, True)
        found = runner.measure(by_block[256, 2])
        assert (found.outcome, found.time_us) == (Outcome.OK, 106.0)
        assert set(runner.finals([by_block[128, 2], by_block[256, 2]]).samples_us[by_block[256, 2]]) == {106.0}
        assert runner.confirm(by_block[256, 2]).outcome is Outcome.OK
    finally:
        runner.close()

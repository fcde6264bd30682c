"""`blocktune.autotune` on a GPU: right results, restored arguments, and nothing measured twice."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from blocktune.db.records.records import Outcome
from blocktune.runtime.autotuned.settings import Settings
from blocktune.runtime.selection.ladder import Rung
from blocktune.tuner.drop_in.autotune import autotune
from blocktune.tuner.drop_in.install import install, uninstall
from blocktune.tuner.launches.launch_runner import LaunchRunner
from tests.support.libraries.autotuned_kernels import CONFIGS, faulty_kernel, row_kernel, scale_kernel, sum_kernel
from tools import ROOT, python

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_DB", str(tmp_path / "store.db"))


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def test_a_kernel_in_place_computes_once_and_a_second_tuner_measures_nothing() -> None:
    for expected in (True, False):
        x = torch.ones(100_000, device="cuda")
        kernel = autotune(CONFIGS, ["n"], restore_value=["x"])(scale_kernel.fn)
        kernel[grid](x, 100_000, 2.0)
        assert torch.equal(x, torch.full_like(x, 2.0))
        (choice,) = kernel.kernel.choices.values()
        assert (choice.rung, choice.tuned) == (Rung.EXACT, expected)
        kernel[grid](x, 100_000, 2.0)
        assert torch.equal(x, torch.full_like(x, 4.0))


def test_sums_are_reset_between_measurements() -> None:
    x, out = torch.ones(65_536, device="cuda"), torch.zeros(1, device="cuda")
    kernel = autotune(CONFIGS, ["n"], reset_to_zero=["out"])(sum_kernel.fn)
    kernel[grid](out, x, 65_536)
    assert out.item() == 65_536
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel[grid](out, x, 65_536)
    graph.replay()
    assert out.item() == 2 * 65_536


def test_the_time_of_a_short_kernel_is_not_that_of_its_launch() -> None:
    """Triton takes tens of microseconds of the host for a launch; the kernel takes a few of the GPU. On another stream
    than the default one, which a clock must not wait for."""
    x = torch.ones(1024, device="cuda")
    torch.cuda.synchronize()
    kernel = autotune(CONFIGS, ["n"], restore_value=["x"])(scale_kernel.fn)
    with torch.cuda.stream(torch.cuda.Stream()):
        kernel[grid](x, 1024, 2.0)
        torch.cuda.current_stream().synchronize()
    (choice,) = kernel.kernel.choices.values()
    assert torch.equal(x, torch.full_like(x, 2.0))
    assert len(choice.times_us) == len(CONFIGS)
    assert max(choice.times_us.values()) < 12


def test_descriptors_get_the_blocks_of_each_config() -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    def set_blocks(named: dict[str, Any]) -> None:
        named["rows"].block_shape = [1, named["BLOCK"]]

    x, out = torch.randn(64, 1024, device="cuda"), torch.zeros(64, device="cuda")
    configs = [triton.Config({"BLOCK": block}, num_warps=2, pre_hook=set_blocks) for block in (64, 128, 256)]
    kernel = autotune(configs, ["n"])(row_kernel)
    for _ in range(2):
        kernel[(64,)](TensorDescriptor.from_tensor(x, [1, 1]), out, 1024)
        torch.testing.assert_close(out, x.sum(1), rtol=1e-4, atol=1e-3)
    (choice,) = kernel.kernel.choices.values()
    assert (len(choice.times_us), kernel.kernel.misses) == (3, 1)


def test_processes_that_start_at_once_agree_on_what_one_of_them_measures(tmp_path: Path) -> None:
    code = """
import json, torch, triton
from blocktune import install
from tests.support.libraries.autotuned_kernels import scale_kernel
install()
x = torch.ones(1_000_000, device="cuda")
scale_kernel[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](x, 1_000_000, 2.0)
(choice,) = scale_kernel._blocktune_kernel[1].choices.values()
print(json.dumps([choice.tuned, str(choice.launched), x.sum().item()]))
"""
    environment = os.environ | {"BLOCKTUNE_DB": str(tmp_path / "store.db"), "XDG_CACHE_HOME": str(tmp_path)}
    command = python(code)
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for _ in range(4)
    ]
    ended = [process.communicate(timeout=200) for process in started]
    answers = [json.loads(out) for out, error in ended if out or pytest.fail(error)]
    assert sorted(tuned for tuned, _, _ in answers) == [False, False, False, True]
    assert len({config for _, config, _ in answers}) == 1
    assert {total for _, _, total in answers} == {2_000_000.0}


def test_a_config_that_faults_in_a_child_costs_itself() -> None:
    install(settings=Settings(isolate=True))
    try:
        x = torch.zeros(100_000, device="cuda")
        faulty_kernel[grid](x, 100_000)
        assert torch.equal(x, torch.ones_like(x))
        (choice,) = faulty_kernel._blocktune_kernel[1].choices.values()
    finally:
        uninstall()
    assert choice.launched.kwargs["BLOCK"] < 512
    assert sum("BLOCK=512" in label for label in choice.dropped) == 2


def test_a_search_around_the_list_is_right() -> None:
    x = torch.ones(1 << 22, device="cuda")
    kernel = autotune(CONFIGS[:2], ["n"], restore_value=["x"], expand=12)(scale_kernel.fn)
    kernel[grid](x, 1 << 22, 2.0)
    assert torch.equal(x, torch.full_like(x, 2.0))
    (choice,) = kernel.kernel.choices.values()
    assert len(choice.times_us) > 2


def test_a_launch_that_is_known_costs_the_host_no_more_than_under_triton() -> None:
    x = torch.ones(1000, device="cuda")
    best = []
    for make in (triton.autotune, autotune):
        kernel = make(CONFIGS[:2], ["n"])(scale_kernel.fn)
        launch = kernel[(4,)]
        launch(x, 1000, 1.0)
        torch.cuda.synchronize()
        times = []
        for _ in range(10):
            start = time.perf_counter()
            for _ in range(200):
                launch(x, 1000, 1.0)
            times.append(time.perf_counter() - start)
            torch.cuda.synchronize()
        best.append(min(times))
    assert best[1] <= best[0]


@pytest.mark.parametrize("isolate", [False, True])
def test_a_runner_times_and_checks_configs_and_restores_the_arguments(isolate: bool) -> None:
    x = torch.ones(1 << 22, device="cuda")
    kernel = autotune(CONFIGS, ["n"], isolate=isolate)(scale_kernel.fn).kernel
    call = kernel.call_of((x, x.numel(), 2.0), {"grid": grid, "warmup": False})
    runner = LaunchRunner(call)
    try:
        found = {config: runner.measure(config) for config in call.configs}
        assert {each.outcome for each in found.values()} == {Outcome.OK}, found
        assert all(1.0 < (each.time_us or 0.0) < 1000.0 for each in found.values())
        finals = runner.finals(list(call.configs)[:2])
        assert {len(samples) for samples in finals.samples_us.values()} == {150}
        assert runner.confirm(call.default).outcome is Outcome.OK
        assert all(len(bursts) == 1 for bursts in runner.energies([call.default], 1).bursts.values())
    finally:
        runner.close()
    assert torch.equal(x, torch.ones_like(x))

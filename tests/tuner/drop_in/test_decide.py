"""Many processes, one that tunes; and what a call costs the host when its choice is known."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.driver import DriverReport
from blocktune.kernels.values.errors import NoDeviceError
from blocktune.runtime.selection.ladder import Rung
from blocktune.tuner.drop_in import decide, node_lock
from blocktune.tuner.drop_in.autotune import autotune
from blocktune.tuner.measure import lock_file
from tests.support.fakes.fake_triton import FakeGpu
from tests.support.libraries.autotuned_kernels import CONFIGS, scale_kernel
from tests.support.suite import warm_python
from tests.support.triton_modes import compiled_here
from tools import ROOT, program, python

pytestmark = compiled_here


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


HOLD = """
import pathlib, sys, time
from blocktune.tuner.drop_in import node_lock
from blocktune.tuner.measure import lock_file
lock_file.cache_folder = lambda: pathlib.Path(sys.argv[1])
with node_lock.node_lock(sys.argv[2], "a kernel", lock_file.Patience(0.0)) as held:
    print(held, flush=True)
    time.sleep(float(sys.argv[3]))
"""


def holder(folder: Path, name: str, seconds: float) -> "subprocess.Popen[str]":
    """A process that holds a lock for a while, from now on."""
    process = subprocess.Popen([*python(HOLD), str(folder), name, str(seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    return process


def test_a_lock_is_waited_for_until_its_holder_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_file, "cache_folder", lambda: tmp_path)
    with holder(tmp_path, "a", 1000) as process:
        with node_lock.node_lock("b", "a kernel", lock_file.Patience(0.0)) as held:
            assert held
        with node_lock.node_lock("a", "a kernel", lock_file.Patience(0.2)) as held:
            assert not held
        process.kill()
        with node_lock.node_lock("a", "a kernel", lock_file.Patience(20.0)) as held:
            assert held


def started(folder: Path, store: str, *roles: str) -> list[Any]:
    """What processes of a node tell that start at once, in their order."""
    command = [*program("libraries.autotuned_start"), str(folder), store, *roles]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_of_processes_that_start_at_once_one_tunes_and_all_agree(tmp_path: Path, count: int) -> None:
    """Neither a process that dies while it tunes nor one that never comes to the kernel holds up the others."""
    answers = started(tmp_path, str(tmp_path / "store.db"), "dies", "absent", *["tunes"] * count)
    assert answers[:2] == [None, None]
    assert sorted(tuned for tuned, _ in answers[2:]) == [False] * (count - 1) + [True]
    assert len({label for _, label in answers[2:]}) == 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_without_a_store_processes_tune_one_after_the_other(tmp_path: Path) -> None:
    answers = started(tmp_path, "/dev/null/store.db", "tunes", "tunes")
    assert [tuned for tuned, _ in answers] == [True, True]


def test_where_no_lock_can_be_made_everyone_tunes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_file, "cache_folder", lambda: Path("/dev/null/cache"))
    with node_lock.node_lock("a", "a kernel", lock_file.Patience(0.0)) as held:
        assert held


def test_a_process_that_waits_in_vain_goes_on_with_the_first_config(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names: list[str] = []
    real = node_lock.node_lock
    monkeypatch.setattr(
        "blocktune.tuner.drop_in.decide.node_lock", lambda name, *wait: names.append(name) or real(name, *wait)
    )
    autotune(CONFIGS, ["n"])(scale_kernel.fn)[grid](torch.ones(1000), 999, 2.0)
    name = names[0].replace('"n":999', '"n":1000')
    with holder(tmp_path / "cache", name, 1000) as process:
        kernel, timed = autotune(CONFIGS, ["n"], wait_seconds=0.2, accept="exact")(scale_kernel.fn), len(gpu.timed)
        kernel[grid](torch.ones(1000), 1000, 2.0)
        process.kill()
    (choice,) = kernel.kernel.choices.values()
    assert choice.rung is Rung.NEAREST  # what is known of 999
    assert len(gpu.timed) == timed
    assert "this one stops waiting, and uses the best config it knows" in caplog.text


def test_a_known_call_costs_the_host_less_than_under_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuners' own work, without the launch: that is the same function of Triton's for both."""
    monkeypatch.setattr(scale_kernel.fn, "run", lambda *args, **kwargs: None)
    x, stock_key = torch.ones(1000), (1000, "torch.float32")
    tuners = [triton.autotune(CONFIGS, ["n"])(scale_kernel.fn), autotune(CONFIGS, ["n"])(scale_kernel.fn)]
    best = [float("inf")] * 2
    for tuner in tuners:
        tuner.cache[stock_key] = CONFIGS[0]
    for _ in range(20):
        for place, tuner in enumerate(tuners):
            start = time.perf_counter()
            for _ in range(500):
                tuner.run(x, 1000, 2.0, grid=(1,), warmup=False)
            best[place] = min(best[place], time.perf_counter() - start)
    assert best[1] < best[0]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ranks_launch_with_one_config_whoever_stays_away_or_dies(tmp_path: Path) -> None:
    """On a host with several GPUs they are real ones. Without a store each rank decides for itself."""
    command = [*program("libraries.autotuned_ranks"), str(tmp_path / "ranks"), "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    scenes = {
        row["scene"]: [told for told in row["ranks"] if told] for row in map(json.loads, done.stdout.splitlines())
    }
    assert {name: len(told) for name, told in scenes.items()} == {
        "all synchronise": 4, "one is absent": 3, "one dies": 3, "the store is away": 4,
    }  # fmt: skip
    assert all(told["right"] for own in scenes.values() for told in own)
    for name in ("all synchronise", "one is absent", "one dies"):
        assert len({told["config"] for told in scenes[name]}) == 1
        assert sum(told["tuned"] for told in scenes[name]) == 1
    assert len({told["synchronised"] for told in scenes["all synchronise"]}) == 1


def test_without_a_gpu_a_kernel_of_the_users_is_told_of_no_command_about_shapes(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> DeviceSpec:
        raise NoDeviceError("A GPU is required here. `tune run --device h200` predicts.")

    report = DriverReport(problem="No driver is installed.")
    monkeypatch.setattr(decide, "current_device", absent)
    monkeypatch.setattr(decide, "read_driver", lambda: report)
    with pytest.raises(NoDeviceError) as caught:
        autotune(CONFIGS, ["n"])(scale_kernel.fn)[(4,)](torch.ones(1000), 1000, 2.0)
    text = str(caught.value)
    assert text.startswith("tests.support.libraries.autotuned_kernels:scale_kernel is launched on a GPU. No driver")
    assert "`tune occupancy tests.support.libraries.autotuned_kernels:scale_kernel`" in text
    assert "--device" not in text


@pytest.mark.parametrize("command", ["run", "verify"])
def test_without_a_gpu_commands_about_a_kernel_say_the_same(command: str, tmp_path: Path) -> None:
    kernel = "tests.support.libraries.autotuned_kernels:scale_kernel"
    arguments = ("--args", "tests.support.libraries.autotuned_kernels:scale_arguments", "--grid", "n=1000")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "BLOCKTUNE_DB": str(tmp_path / "store.db")}
    words = ["-m", "blocktune", command, kernel, *arguments]
    done = warm_python.run([sys.executable, "-P", *words], env=environment | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == NoDeviceError.exit_code, done.stderr
    assert f"error: {kernel} is launched on a GPU. " in done.stderr

"""Whatever fails around a launch, the launch gets its best config, and one warning names the cause."""

import errno
import fcntl
import hashlib
import logging
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pynvml
import pytest
import torch
import triton
from triton import knobs
from triton import language as tl

from blocktune.db.store import ResultStore
from blocktune.kernels.hardware import nvml
from blocktune.runtime.autotuned import call, choices, config, kernel
from blocktune.runtime.autotuned.call_key import CallKey
from blocktune.tuner.drop_in import ahead, decide, known, node_lock, results, tune_call
from blocktune.tuner.drop_in import install as installation
from blocktune.tuner.drop_in.autotune import autotune
from blocktune.tuner.drop_in.install import install
from blocktune.tuner.measure import lock_file, telemetry
from tests.support.fakes.fake_nvml import FakeNvml
from tests.support.fakes.fake_triton import FakeGpu
from tests.support.libraries.autotuned_kernels import scale_kernel
from tests.support.triton_modes import compiled_here
from tests.tuner.drop_in.conftest import H200, decorated, grid
from tools import python

pytestmark = compiled_here


@pytest.fixture(autouse=True)
def _fresh() -> None:
    scale_kernel.cache.clear()
    vars(scale_kernel).pop("do_bench", None)  # of the GPU of an earlier test


class Broken(Exception):
    """An error that no code of ours knows."""


def fail(*_: Any, **__: Any) -> NoReturn:
    raise Broken("it is broken")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def with_machine(**parts: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def replace_parts(patch: pytest.MonkeyPatch) -> None:
        made = replace(tune_call.machine(), **parts)
        patch.setattr(tune_call, "machine", lambda: made)

    return replace_parts


def failing(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, fail, raising=False)


def failing_compiler(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(tune_call.machine().ahead, name, fail)


SEAMS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the key": failing(CallKey, "problem"),
    "the source": failing(kernel, "hash_of_sources"),
    "the stored form of a config": failing(call, "launch_config"),
    "the device": failing(decide, "current_device"),
    "frozen files": failing(known, "frozen_winners"),
    "stored winners": failing(known, "stored_winners"),
    "stored winners before a race": failing(tune_call, "stored_winners"),
    "the file of a kernel's lock": failing(node_lock, "open_lock_file"),
    "the folder of locks": failing(lock_file, "cache_folder"),
    "flock": failing(fcntl, "flock"),
    "the import of the kernel": failing(tune_call, "is_importable"),
    "the start of the compiler": failing_compiler("start"),
    "the compiler": failing_compiler("compile"),
    "the specialisation": failing(tune_call, "specialization_of"),
    "NVML": failing(tune_call, "GpuMonitor"),
    "telemetry": failing(telemetry.GpuMonitor, "sample"),
    "versions": failing(tune_call, "measuring_environment"),
    "the store": with_machine(open_store=fail),
    "reading the store": failing(ResultStore, "trials"),
    "writing the store": failing(ResultStore, "put_all"),
    "costs": failing(results, "rates_of"),
    "the listener": failing(knobs.autotuning, "listener"),
}


@pytest.mark.parametrize("how", ["autotune", "install"])
@pytest.mark.parametrize("seam", SEAMS)
def test_what_fails_around_a_launch_costs_one_warning(
    seam: str, how: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    SEAMS[seam](monkeypatch)
    if how == "install":
        install()
    tuned, x = scale_kernel if how == "install" else decorated(), torch.ones(1000)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            tuned[grid](x, 1000, 2.0)
    assert [(launch.arguments["BLOCK"], launch.num_warps) for launch in gpu.launches[-2:]] == [(256, 2)] * 2
    (warning,) = warnings_of(caplog)
    assert "Broken: it is broken" in warning


@pytest.mark.parametrize("seam", [(installation, "prepare"), (ahead, "nvml_devices"), (ahead, "autotuned_rows")])
def test_what_fails_while_a_library_is_imported_costs_one_warning(
    seam: tuple[Any, str], gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if seam[1] == "autotuned_rows":
        monkeypatch.setattr(ahead, "nvml_devices", lambda: (H200,))
    monkeypatch.setattr(ahead, "_packages", set())
    monkeypatch.setattr(*seam, fail)
    install()
    tuned = triton.autotune(list(scale_kernel.configs), ["n"])(scale_kernel.fn)
    for thread in threading.enumerate():
        if thread.name == "blocktune-ahead":
            thread.join()
    assert best_block(gpu, tuned, torch.ones(1000), 1000, 2.0) == 256
    (warning,) = warnings_of(caplog)
    assert "a process that compiles, which failed: Broken" in warning


CONSTANTS: dict[str, dict[str, Any]] = {
    "large": {"LIMIT": 1 << 24},
    "larger": {"LIMIT": 1 << 70},
    "infinite": {"LIMIT": float("-inf")},
    "no number": {"LIMIT": float("nan")},
    "a long text": {"LIMIT": "x" * 5000},
}


@triton.jit
def bounded_kernel(x, n, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, 1.0, offsets < n)


@triton.jit
def long_names_kernel(
    x,
    n,
    Größe: tl.constexpr,
    A_NAME_OF_MORE_THAN_SIXTY_FOUR_LETTERS_AS_GENERATED_CODE_MAY_HAVE_THEM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, 1.0, offsets < n)


LONG_NAME = "A_NAME_OF_MORE_THAN_SIXTY_FOUR_LETTERS_AS_GENERATED_CODE_MAY_HAVE_THEM"


def best_block(gpu: FakeGpu, tuned: Any, *arguments: Any) -> int:
    """The block that a kernel is launched with at last."""
    tuned[grid](*arguments)
    block: int = gpu.launches[-1].arguments["BLOCK"]
    return block


@pytest.mark.parametrize("kind", CONSTANTS)
def test_any_constant_may_stand_in_a_config(kind: str, gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    configs = [triton.Config({"BLOCK": block, **CONSTANTS[kind]}, num_warps=2) for block in (128, 256)]
    for timed in (2, 0):  # the second one knows the winner
        gpu.timed.clear()
        assert best_block(gpu, autotune(configs, ["n"])(bounded_kernel), torch.ones(1000), 1000) == 256
        assert (len({launch.arguments["BLOCK"] for launch in gpu.timed})) == timed
    assert not warnings_of(caplog)


def test_a_search_beyond_the_list_keeps_values_that_are_stored_as_text(gpu: FakeGpu) -> None:
    configs = [triton.Config({"BLOCK": block, "LIMIT": float("inf")}, num_warps=2) for block in (64, 128)]
    assert best_block(gpu, autotune(configs, ["n"], expand=2)(bounded_kernel), torch.ones(1000), 1000) == 256
    assert {launch.arguments["LIMIT"] for launch in gpu.launches} == {float("inf")}


def test_any_name_may_stand_in_a_config(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    configs = [triton.Config({"BLOCK": block, "Größe": 1, LONG_NAME: 2}, num_warps=2) for block in (128, 256)]
    for timed in (2, 0):
        gpu.timed.clear()
        assert best_block(gpu, autotune(configs, ["n"])(long_names_kernel), torch.ones(1000), 1000) == 256
        assert (len({launch.arguments["BLOCK"] for launch in gpu.timed})) == timed
    assert not warnings_of(caplog)


@pytest.mark.parametrize("value", ["x" * 5000, float("nan"), float("inf"), 1 << 70], ids=lambda value: str(value)[:5])
def test_any_value_may_be_a_key(value: Any, gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    configs = [triton.Config({"BLOCK": block}, num_warps=2) for block in (128, 256)]
    for timed in (2, 0):
        gpu.timed.clear()
        assert best_block(gpu, autotune(configs, ["LIMIT"])(bounded_kernel), torch.ones(1000), 1000, value) == 256
        assert (len({launch.arguments["BLOCK"] for launch in gpu.timed})) == timed
    assert not warnings_of(caplog)


@pytest.mark.parametrize(("limit", "value"), [("MAX_PROBLEM_TEXT", 40), ("MAX_CONFIG_TEXT", 20)])
def test_what_no_store_can_hold_is_tuned_in_memory(
    limit: str, value: int, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (call, config):
        monkeypatch.setattr(module, limit, value, raising=False)
    tuned = decorated()
    assert best_block(gpu, tuned, torch.ones(1000), 1000, 2.0) == 256
    (warning,) = warnings_of(caplog)
    assert f"up to {value} characters" in warning
    timed = len(gpu.timed)
    tuned[grid](torch.ones(1000), 1000, 2.0)
    assert len(gpu.timed) == timed


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_where_the_file_system_has_no_locks_every_process_tunes(
    code: int, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise OSError(code, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert best_block(gpu, decorated(), torch.ones(1000), 1000, 2.0) == 256
    (warning,) = warnings_of(caplog)
    assert "no locks" in warning


def test_an_old_pynvml_tells_less_and_breaks_nothing(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of pynvml 11.4, whose texts are bytes and which lacks newer functions."""
    library = FakeNvml()
    library.install(monkeypatch)
    monkeypatch.setattr(library, "name", b"NVIDIA H200")
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: b"470.82.01")
    monkeypatch.delattr(pynvml, "nvmlDeviceGetComputeRunningProcesses_v3")
    monkeypatch.delattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption")
    opened = nvml.Nvml.open()
    assert opened is not None
    (found,) = opened.gpus()
    assert (opened.driver_version(), found.name, found.num_processes, found.energy_j) == (
        "470.82.01",
        "NVIDIA H200",
        None,
        None,
    )


def test_a_tuner_over_what_is_not_jitted_stays_with_triton(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    class Launcher:
        def __init__(self) -> None:
            self.fn = lambda x: None
            self.blocks: list[int] = []

        def run(self, x: Any, BLOCK: int, **options: Any) -> None:
            self.blocks.append(BLOCK)

    launcher = Launcher()
    configs = [triton.Config({"BLOCK": block}) for block in (128, 256)]
    bench = lambda launch, quantiles: (launch(), [1.0 / launcher.blocks[-1]] * 3)[1]  # noqa: E731
    install()
    tuned = triton.runtime.Autotuner(launcher, ["x"], configs, [], None, None, do_bench=bench)
    for _ in range(2):
        tuned.run(1)
    assert launcher.blocks == [128, 256, 256, 256]
    (warning,) = warnings_of(caplog)
    assert "not a function of `triton.jit`" in warning


HOLD = """
import pathlib, sys, time
from blocktune.tuner.measure import lock_file
lock_file.cache_folder = lambda: pathlib.Path(sys.argv[1])
with lock_file.open_lock_file(sys.argv[2]) as file:
    print(lock_file.acquire_lock(file, lock_file.Patience(0.0), print), flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("expand", [0, 4])
def test_a_stopped_process_that_holds_the_gpu_is_named_and_waited_for_no_longer_than_said(
    expand: int, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decide, "current_device", lambda: replace(H200, uuid="GPU-1"))
    monkeypatch.setattr(lock_file, "QUIET_SECONDS", 0.2)
    name = f"gpu-{hashlib.sha256(b'GPU-1').hexdigest()[:16]}"
    command = [*python(HOLD), str(tmp_path / "cache"), name]
    tuned = decorated(wait_seconds=1.0, expand=expand)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        holder.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        tuned[grid](torch.ones(1000), 1000, 2.0)
        waited_seconds = time.monotonic() - started
        holder.kill()
    assert gpu.launches[-1].arguments["BLOCK"] == 128, "the first of the list"
    assert not gpu.timed
    assert waited_seconds < 30
    told, *_, given_up = (text for text in warnings_of(caplog) if "telemetry" not in text)
    assert f"process {holder.pid} (stopped) measures on the GPU GPU-1; waiting for it" in told
    assert "stops waiting" in given_up


def test_a_locked_store_is_waited_for_no_longer_than_said(
    gpu: FakeGpu, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_machine(open_store=lambda seconds: ResultStore.open(path, lock_timeout_seconds=seconds))(monkeypatch)
    ResultStore.open(path).close()
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        started = time.monotonic()
        assert best_block(gpu, decorated(wait_seconds=1.0), torch.ones(1000), 1000, 2.0) == 256
    assert time.monotonic() - started < 15
    (warning,) = warnings_of(caplog)
    assert "a store of its results, which failed: StoreLockedError" in warning


def test_a_listener_may_wait_for_another_launch_of_its_kernel(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, launched = decorated(), threading.Event()

    def launch() -> None:
        with torch.no_grad():
            tuned[grid](torch.ones(1000), 1000, 2.0)
        launched.set()

    def listen(**_: Any) -> None:
        threading.Thread(target=launch, daemon=True).start()
        assert launched.wait(60)

    monkeypatch.setattr(knobs.autotuning, "listener", listen, raising=False)
    tuned[grid](torch.ones(1000), 1000, 2.0)
    assert launched.is_set()
    assert tuned.kernel.table.calls == 2


def test_lengths_that_change_with_every_step_do_not_pile_up(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "MAX_CHOICES", 4)
    monkeypatch.setattr(choices, "MAX_KINDS", 6)
    tuned = decorated(configs=scale_kernel.configs[:2], do_bench=lambda launch, quantiles: (launch(), [1.0] * 3)[1])
    for length in range(1000, 1010):
        tuned[grid](torch.ones(1000), length, 2.0)
    assert (len(tuned.kernel.table.served), len(tuned.cache), len(tuned.kernel.table.launches)) == (4, 4, 6)
    assert tuned.kernel.table.calls == 10

"""When the process that compiles is started before there is work for it."""

import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

from blocktune.kernels.tuned.settings import STRICT_VARIABLE, Settings
from blocktune.tuner.tuned import ahead
from blocktune.tuner.tuned.install import install, uninstall
from tests.support.autotuned_kernels import CONFIGS, scale_kernel
from tests.support.fake_triton import FakeGpu
from tests.support.triton_modes import compiled_here
from tests.tuner.tuned.conftest import H200

pytestmark = compiled_here

NAME = "tests.support.autotuned_kernels:scale_kernel"
STOCK_INIT = Autotuner.__init__


class Compiler:
    """Notes whose package it is to import."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def start(self, kernel: str) -> None:
        self.started.append(kernel)


@pytest.fixture
def compiler(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """That of a machine with an H200 and an empty store."""
    made = Compiler()
    monkeypatch.setattr(ahead, "compile_ahead", made)
    monkeypatch.setattr(ahead, "nvml_devices", lambda: (H200,))
    monkeypatch.setattr(ahead, "_packages", set[str]())
    yield made
    uninstall()


def decorate() -> Any:
    """Let a library decorate a kernel, and wait for what that starts."""
    kernel = triton.autotune(CONFIGS, ["n"])(scale_kernel.fn)
    for thread in threading.enumerate():
        if thread.name == "blocktune-ahead":
            thread.join()
    return kernel


def test_the_first_kernel_of_a_package_starts_it(compiler: Compiler) -> None:
    decorate()
    assert not compiler.started
    install()
    assert isinstance(decorate(), Autotuner)
    decorate()
    assert compiler.started == [NAME]
    uninstall()
    assert Autotuner.__init__ is STOCK_INIT


def test_a_package_that_the_store_knows_is_not_imported_ahead(compiler: Compiler) -> None:
    install()
    scale_kernel[(1,)](torch.ones(1000), 1000, 2.0)  # which is tuned, and stored
    decorate()
    assert not compiler.started


@pytest.mark.parametrize("options", [{"settings": Settings(strict=True)}, {"without": [NAME]}, {"only": ["fla.*"]}])
def test_kernels_that_are_not_tuned_start_nothing(compiler: Compiler, options: dict[str, Any]) -> None:
    install(**options)
    decorate()
    assert not compiler.started


def test_nor_do_processes_that_tune_nothing(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    for owner, name, value in (
        (ahead, "nvml_devices", tuple),
        (ahead, "is_given_winners", lambda: True),
        (multiprocessing, "parent_process", multiprocessing.current_process),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            decorate()
        ahead._packages.clear()
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    decorate()
    assert not compiler.started

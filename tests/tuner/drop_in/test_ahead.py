"""When the process that compiles is started before there is work for it."""

import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

from blocktune.autoload import install_by_environment
from blocktune.kernels.files.variables import AUTOTUNE, STRICT
from blocktune.runtime.autotuned.settings import Settings
from blocktune.tuner.drop_in import ahead
from blocktune.tuner.drop_in.install import install, uninstall
from tests.support.fakes.fake_triton import FakeGpu
from tests.support.libraries.autotuned_kernels import CONFIGS, scale_kernel
from tests.support.triton_modes import compiled_here
from tests.tuner.drop_in.conftest import H200

pytestmark = compiled_here

NAME = "tests.support.libraries.autotuned_kernels:scale_kernel"
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
    settle()
    return kernel


def settle() -> None:
    """Wait for what began in the background."""
    for thread in threading.enumerate():
        if thread.name == "blocktune-ahead":
            thread.join()


def test_it_begins_with_install_and_takes_a_package_with_its_first_kernel(compiler: Compiler) -> None:
    decorate()
    assert not compiler.started
    install()
    settle()
    assert compiler.started == ["torch._dynamo"]
    assert isinstance(decorate(), Autotuner)
    decorate()
    assert compiler.started == ["torch._dynamo", NAME]
    uninstall()
    assert Autotuner.__init__ is STOCK_INIT


def test_nothing_begins_ahead_where_the_store_knows_the_package(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment begins nothing by itself: processes without a kernel inherit it."""
    monkeypatch.setenv(AUTOTUNE.name, "1")
    install_by_environment()
    scale_kernel[(1,)](torch.ones(1000), 1000, 2.0)  # which is tuned, and stored
    install()
    decorate()
    assert not compiler.started


@pytest.mark.parametrize("options", [{"settings": Settings(strict=True)}, {"without": [NAME]}, {"only": ["fla.*"]}])
def test_kernels_that_are_not_tuned_start_nothing(compiler: Compiler, options: dict[str, Any]) -> None:
    install(**options)
    decorate()
    assert NAME not in compiler.started


def test_nor_do_processes_that_tune_nothing(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, value in (
        (ahead, "nvml_devices", tuple),
        (ahead, "is_given_winners", lambda: True),
        (multiprocessing, "parent_process", multiprocessing.current_process),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            install()
            decorate()
        ahead._packages.clear()
    monkeypatch.setenv(STRICT.name, "1")
    install()
    decorate()
    assert not compiler.started

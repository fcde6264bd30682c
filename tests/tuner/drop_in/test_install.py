"""The tuner under every `@triton.autotune` of a process, and away again."""

import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

from blocktune.autoload import install_by_environment
from blocktune.db.exchange.document import frozen_document, save_text
from blocktune.db.store import ResultStore
from blocktune.kernels.files.json_pieces import canonical_text
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.runtime.autotuned.settings import Settings
from blocktune.runtime.selection.ladder import Rung
from blocktune.tuner.drop_in.install import install, install_without_compiler, uninstall
from tests.support.fakes.fake_triton import FakeGpu
from tests.support.libraries import autotuned_kernels
from tests.support.libraries.autotuned_kernels import CONFIGS, scale_kernel, sum_kernel
from tests.support.triton_modes import compiled_here
from tests.tuner.drop_in.conftest import H200

pytestmark = compiled_here

STOCK = Autotuner.run


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    for kernel in (scale_kernel, sum_kernel):
        kernel.cache.clear()


def held(kernel: Any) -> Any:
    return kernel._blocktune_kernel[1]


def test_kernels_that_were_decorated_before_are_tuned(gpu: FakeGpu) -> None:
    install()
    scale_kernel[grid](torch.ones(1000), 1000, 2.0)
    assert gpu.launches[-1].arguments["BLOCK"] == 256
    assert held(scale_kernel).misses == 1
    install(settings=Settings(strict=True))  # another way from now on
    scale_kernel[grid](torch.ones(1000), 1000, 2.0)
    with pytest.raises(UsageError, match="is strict, but none of its"):
        scale_kernel[grid](torch.ones(1000), 999, 2.0)
    uninstall()
    assert Autotuner.run is STOCK
    uninstall()


def test_programs_that_read_the_arguments_of_tritons_tuner_find_them() -> None:
    """PyTorch's compiler does."""
    stock = inspect.signature(Autotuner.__init__)
    install_without_compiler(only=(), without=(), settings=Settings(), frozen=None)
    assert Autotuner.run is not STOCK
    assert inspect.signature(Autotuner.__init__) == stock
    uninstall()


def test_kernels_may_be_named_in_or_out(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    stock: list[Any] = []
    monkeypatch.setattr(Autotuner, "run", lambda self, *args, **kwargs: stock.append(self))
    for options in ({"only": ["*:sum_*"]}, {"without": [f"{autotuned_kernels.__name__}:scale_kernel"]}):
        install(**options)
        scale_kernel[grid](torch.ones(1000), 1000, 2.0)
        sum_kernel[grid](torch.zeros(1), torch.ones(1000), 1000)
        assert stock == [scale_kernel]
        assert held(sum_kernel).table.calls == 1
        uninstall()
        stock.clear()
    with pytest.raises(
        UsageError, match=r"`only` must be a sequence of names, but got the text 'a:b'. Write \['a:b'\]"
    ):
        install(only="a:b")
    with pytest.raises(UsageError, match=r"`settings` must be of `blocktune.Settings`, but got {'l2': 'warm'}"):
        install(settings={"l2": "warm"})  # type: ignore[arg-type]


def test_settings_take_the_words_that_autotune_takes() -> None:
    made = Settings(accept="exact", buckets={"n": "power_of_two"})  # type: ignore[arg-type, dict-item]
    assert made.accept is Rung.EXACT
    assert made.buckets["n"](1000) == 1024
    with pytest.raises(UsageError, match=r"`accept` must be one of exact, .* but got 'any'"):
        Settings(accept="any")  # type: ignore[arg-type]


def test_what_a_library_has_put_into_the_cache_of_its_kernel_stays(gpu: FakeGpu) -> None:
    """As flash-linear-attention does with configs that it ships."""
    install()
    scale_kernel.cache[(1000, "torch.float32")] = CONFIGS[-1]
    scale_kernel[grid](torch.ones(1000), 1000, 2.0)
    assert (gpu.launches[-1].arguments["BLOCK"], len(gpu.launches)) == (512, 1)


def test_what_was_chosen_under_other_settings_is_chosen_again(gpu: FakeGpu) -> None:
    """The winner stands in the cache of the library's tuner, too, where nothing may take it for a preset."""
    for settings in (Settings(), Settings(accept=Rung.EXACT)):
        install(settings=settings)
        scale_kernel[grid](torch.ones(1000), 1000, 2.0)
        assert [choice.device for choice in held(scale_kernel).choices.values()] == [H200.key]
    held(scale_kernel).forget()
    assert not scale_kernel.cache


def test_a_frozen_file_makes_a_job_start_without_a_measurement(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    scale_kernel[grid](torch.ones(1000), 1000, 2.0)
    path = tmp_path / "frozen.json"
    with ResultStore.open() as store:
        save_text(canonical_text(frozen_document(H200, store.kernel_bests())), path)
    monkeypatch.setenv("BLOCKTUNE_DB", str(tmp_path / "another.db"))

    timed = len(gpu.timed)
    install(frozen=str(path), settings=Settings(strict=True))
    scale_kernel.cache.clear()
    scale_kernel[grid](torch.ones(1000), 1000, 2.0)
    assert len(gpu.timed) == timed
    assert [choice.rung for choice in held(scale_kernel).choices.values()] == [Rung.FROZEN]
    for text in ("{", '{"device": "x"}', '{"device": "x", "kernels": [1]}'):
        path.with_name("broken.json").write_text(text)
        with pytest.raises(UsageError, match=r"frozen=\.\.\."):
            install(frozen=str(path.with_name("broken.json")))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"num_warps": 2},
        {"BLOCK": "256", "num_warps": 2, "num_stages": 3},
        {"BLOCK": 256, "num_warps": 2, "num_stages": 3, "x": 0},
        {"BLOCK": 256, "num_warps": 2, "num_stages": 3, "n": 1},
        {"BLOCK": 256, "num_warps": 2, "num_stages": 3, "ir_override": "/tmp/strange.ttgir"},
        {"BLOCK": 256, "num_warps": 2, "num_stages": 3, "maxnreg": "64"},
        {"BLCK": 256, "num_warps": 2, "num_stages": 3},
        {"BLOCK": 257, "num_warps": 2, "num_stages": 3},
        {"BLOCK": 1 << 19, "num_warps": 2, "num_stages": 3},
        {"BLOCK": -256, "num_warps": 2, "num_stages": 3},
        {"BLOCK": 256, "num_warps": 3, "num_stages": 3},
        {"BLOCK": 256, "num_warps": 64, "num_stages": 3},
        {"BLOCK": 256, "num_warps": 2, "num_stages": 0},
        {"BLOCK": 256, "num_warps": 2, "num_stages": 3, "maxnreg": 1},
        {"BLOCK": 256, "num_warps": True, "num_stages": 3},
    ],
)
@pytest.mark.parametrize("expand", [0, 4])
def test_a_winner_with_other_parameters_than_the_list_is_passed_over(
    parameters: dict[str, Any], expand: int, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hash does not say who froze a file. One that was forged may neither set an argument nor make a launch fail."""
    settings, launched = Settings(expand=expand), (torch.ones(1000), 1000, 2.0)
    install(settings=settings)
    scale_kernel[grid](*launched)
    with ResultStore.open() as store:
        (best,) = store.kernel_bests()
    config = LaunchConfig(best.config.kernel, tuple(parameters.items()))
    path = tmp_path / "forged.json"
    save_text(canonical_text(frozen_document(H200, [replace(best, config=config)])), path)
    monkeypatch.setenv("BLOCKTUNE_DB", str(tmp_path / "another.db"))
    install(frozen=str(path), settings=settings)
    scale_kernel.cache.clear()
    scale_kernel[grid](*launched)
    (choice,) = held(scale_kernel).choices.values()
    assert choice.rung is not Rung.FROZEN
    assert choice.config == best.config


def test_the_environment_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLOCKTUNE_AUTOTUNE", raising=False)
    install_by_environment()
    assert Autotuner.run is STOCK
    monkeypatch.setenv("BLOCKTUNE_AUTOTUNE", "1")
    install_by_environment()
    assert Autotuner.run is not STOCK
    uninstall()


def test_the_entry_point_costs_an_import_of_torch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch calls what `torch.backends` names when it is imported: it must not load Triton unless that is wanted."""
    code = "import sys; from blocktune.autoload import *; install_by_environment(); print('triton' in sys.modules)"
    monkeypatch.delenv("BLOCKTUNE_AUTOTUNE", raising=False)
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

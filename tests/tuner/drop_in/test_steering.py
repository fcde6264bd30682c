"""Programs that steer Triton's tuner: its configs, its cache, its times, its hooks and its benchmarks."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

from blocktune.kernels.hardware.device import device_named
from blocktune.tuner.drop_in import decide
from blocktune.tuner.drop_in import install as installation
from blocktune.tuner.drop_in.autotune import autotune
from blocktune.tuner.drop_in.install import install, uninstall
from tests.support.fakes.fake_triton import FakeGpu
from tests.support.libraries.autotuned_kernels import CONFIGS, scale_kernel, sum_kernel
from tests.support.triton_modes import compiled_here
from tests.tuner.drop_in.conftest import decorated, grid, measured

pytestmark = compiled_here

X = torch.ones(1000)


@pytest.fixture(params=["autotune", "install"])
def tuned(request: pytest.FixtureRequest, gpu: FakeGpu) -> Any:
    """A kernel under our tuner."""
    if request.param == "autotune":
        return decorated()
    install()
    return triton.autotune(list(CONFIGS), ["n"])(scale_kernel.fn)


def launched(gpu: FakeGpu, tuned: Any, n: int = 1000) -> tuple[int, int]:
    """The block and the warps that a call is launched with."""
    tuned[grid](X, n, 2.0)
    return gpu.launches[-1].arguments["BLOCK"], gpu.launches[-1].num_warps


def test_a_list_that_is_replaced_is_the_list(gpu: FakeGpu, tuned: Any) -> None:
    assert launched(gpu, tuned) == (256, 2)
    tuned.configs = [triton.Config({"BLOCK": 512}, num_warps=8)]
    assert launched(gpu, tuned) == (512, 8)
    tuned.configs = list(CONFIGS[:2])
    assert launched(gpu, tuned) == (128, 2)


def test_a_cache_that_is_cleared_is_asked_for_anew(gpu: FakeGpu, tuned: Any) -> None:
    launched(gpu, tuned)
    (key,) = tuned.cache
    gpu.time_us = lambda launch: 1000.0 / launch.arguments["BLOCK"]
    for take_out in (tuned.cache.clear, lambda: tuned.cache.pop(key)):
        take_out()
        assert launched(gpu, tuned) == (256, 2), "which the store knows"
        assert tuned.cache[key] == CONFIGS[2]
    tuned.cache = {key: CONFIGS[-1]}
    launched(gpu, tuned, 999)
    tuned.cache.pop((999, "torch.float32"))
    assert launched(gpu, tuned) == (512, 4), "as a library has put it there"


def test_times_stand_where_triton_keeps_them(gpu: FakeGpu, tuned: Any) -> None:
    launched(gpu, tuned)
    assert tuned.bench_time > 0
    assert tuned.configs_timings.keys() == set(CONFIGS)
    assert tuned.configs_timings[CONFIGS[2]] == [pytest.approx(0.110)] * 3
    assert min(tuned.configs_timings, key=tuned.configs_timings.get) == tuned.best_config


def test_a_list_of_one_is_not_pruned(gpu: FakeGpu) -> None:
    def prune(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is called")

    kernel = decorated(configs=CONFIGS[:1], prune_configs_by={"early_config_prune": prune})
    assert launched(gpu, kernel) == (128, 2)


def test_an_empty_list_is_one_config_without_parameters(gpu: FakeGpu) -> None:
    kernel = autotune([], ["n"])(scale_kernel.fn)
    kernel[(8,)](X, 1000, 2.0, BLOCK=128)
    assert (gpu.launches[-1].num_warps, gpu.launches[-1].num_stages) == (4, 3)


def test_a_key_that_is_no_argument_costs_a_warning(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    kernel = autotune(list(CONFIGS), ["n", "m"])(scale_kernel.fn)
    assert launched(gpu, kernel) == (256, 2)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "names m, which its calls never give: its arguments are x, n, factor, BLOCK" in warning


@pytest.mark.parametrize("time_ms", [0.0, float("inf"), float("nan"), -1.0])
@pytest.mark.parametrize("returns", [list, float])
def test_a_bench_may_return_anything(
    time_ms: float, returns: Callable[..., Any], gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    def bench(launch: Callable[[], None], quantiles: tuple[float, ...]) -> Any:
        launch()
        return time_ms if returns is float else [time_ms] * len(quantiles)

    kernel = decorated(do_bench=bench)
    assert launched(gpu, kernel) == (128, 2), "the first of the list, as under Triton"
    assert launched(gpu, kernel) == (128, 2)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "A row must hold a number from 0.001" in warning


def test_a_share_of_the_list_that_rounds_to_nothing_keeps_one(gpu: FakeGpu) -> None:
    kernel = decorated(
        configs=CONFIGS[1:3],
        prune_configs_by={"perf_model": lambda *_, BLOCK, **__: -BLOCK, "top_k": 0.3},
    )
    assert launched(gpu, kernel) == (256, 2)
    assert not measured(gpu)


def test_a_hook_sees_the_error_of_each_config_that_failed(gpu: FakeGpu) -> None:
    seen: list[str] = []
    balance: list[int] = []

    def before(named: dict[str, Any], reset_only: bool = False) -> None:
        if not reset_only:
            balance.append(1)

    def after(named: dict[str, Any], exception: Exception | None) -> None:
        balance.append(-1)
        if exception is not None:
            seen.append(f"{named['BLOCK']} {named['num_warps']} {type(exception).__name__}: {exception}")

    configs = [triton.Config({"BLOCK": 256}, num_warps=warps) for warps in (2, 128)]
    configs += [triton.Config({"BLOCK": block}) for block in (300, 128)]
    kernel = decorated(configs=configs, pre_hook=before, post_hook=after)
    assert launched(gpu, kernel) == (256, 2)
    assert sum(balance) == 0
    assert len(seen) == 2
    assert any(text.startswith("256 128 OutOfResources: out of resource: threads, Required: 4096") for text in seen)
    assert any(text.startswith("300 4 ") and "power of 2" in text for text in seen)


def test_two_gpus_of_one_process_choose_for_themselves(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = decorated()
    for device, chosen in ((0, "nvidia h200|9.0|132"), (1, "nvidia a100-sxm4-80gb|8.0|108"), (0, "")):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda _, device=device: device)
        monkeypatch.setattr(decide, "current_device", lambda device=device: device_named(("h200", "a100")[device]))
        launched(gpu, kernel)
        devices = [served.explanation.device for served in kernel.kernel.table.served.values()]
        assert devices[-1] == chosen or len(devices) == 2
    assert len(set(devices)) == 2
    assert sum(launches.hits for launches in kernel.kernel.table.launches.values()) == 1


def test_a_library_that_replaces_the_method_after_us_is_named_and_left_alone(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stock = Autotuner.run
    calls: list[Any] = []
    install()
    ours = Autotuner.run

    def locked_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return ours(self, *args, **kwargs)

    Autotuner.run = locked_run
    try:
        sum_kernel[grid](torch.zeros(1), X, 1000)
        assert sum_kernel._blocktune_kernel[1].table.calls == 1
        install()  # as a program and a library of its may both do
        assert Autotuner.run is locked_run
        uninstall()
        assert Autotuner.run is locked_run
        (warning,) = [text for text in caplog.messages if "has replaced `Autotuner.run`" in text]
        assert "locked_run" in warning
        monkeypatch.setitem(installation._stock, "run", lambda self, *args, **kwargs: calls.append("stock"))
        sum_kernel[grid](torch.zeros(1), X, 1001)
        assert calls == [sum_kernel, sum_kernel, "stock"]
    finally:
        monkeypatch.undo()
        Autotuner.run = ours
        uninstall()
        assert Autotuner.run is stock


def test_a_subclass_that_never_calls_tritons_method_is_named(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    """As the tuner of FlagGems; that of flash-linear-attention calls it."""

    class LibraryTuner(Autotuner):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            return self.fn.run(*args, **kwargs, **self.configs[-1].all_kwargs())

    class CachedTuner(Autotuner):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            return super().run(*args, **kwargs)

    install()
    for cls, expected in ((LibraryTuner, (512, 4)), (CachedTuner, (256, 2)), (LibraryTuner, (512, 4))):
        made = cls(scale_kernel.fn, scale_kernel.fn.arg_names, list(CONFIGS), ["n"], None, None)
        assert launched(gpu, made) == expected
    (warning,) = [text for text in caplog.messages if "keep their own tuner" in text]
    assert "LibraryTuner" in warning

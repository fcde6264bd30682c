"""A winner serves launches of about its size, measured in its way: kernels often keep the length out of their key."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.call import LaunchSize
from blocktune.runtime.autotuned.config import BYTES, PROGRAMS
from blocktune.runtime.autotuned.settings import Measuring, Settings, set_measuring
from blocktune.runtime.selection.ladder import Rung
from blocktune.tuner.drop_in import decide
from blocktune.tuner.drop_in.autotune import autotune
from blocktune.tuner.drop_in.install import install
from tests.support.fakes.fake_triton import FakeGpu, Launch
from tests.support.libraries.autotuned_kernels import CONFIGS, scale_kernel
from tests.support.triton_modes import compiled_here
from tests.tuner.drop_in.conftest import decorated, grid, measured

pytestmark = compiled_here


def by_size(launch: Launch) -> float:
    """The time of a launch: large blocks are good for long rows, small ones for short rows."""
    best = 512 if launch.arguments["n"] > 20_000 else 128
    return 100.0 + abs(launch.arguments["BLOCK"] - best) + launch.num_warps


def lengthless(**options: Any) -> Any:
    """A kernel without its length in its key, as in another process."""
    return autotune(list(CONFIGS), [], **options)(scale_kernel.fn)


def block(gpu: FakeGpu, kernel: Any, length: int) -> int:
    """The block that a launch of some length gets at last."""
    kernel[grid](torch.ones(length), length, 2.0)
    last: int = gpu.launches[-1].arguments["BLOCK"]
    return last


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_after_a_warm_up_no_size_is_raced(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    gpu.time_us = by_size
    kernel = lengthless()
    assert block(gpu, kernel, 1 << 20) == 512
    measured(gpu)
    request.addfinalizer(partial(set_measuring, Measuring.ON))
    set_measuring(Measuring.OFF)
    assert block(gpu, kernel, 1008) == 512
    assert block(gpu, decorated(), 1000) == 128  # of which nothing is known
    assert not measured(gpu)
    sized, unknown = warnings_of(caplog)
    assert "another size is used for" in sized
    assert "nothing was measured for n=1000 (fp32 float), and the warm-up did not launch it. It gets" in unknown


def test_after_a_warm_up_nothing_is_measured_on_an_unknown_gpu_either(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def current_device() -> None:
        raise LookupError("a GPU newer than the tables")

    monkeypatch.setattr(decide, "current_device", current_device)
    kernel = decorated()
    assert block(gpu, kernel, 1 << 20) == 256  # by Triton's tuner
    request.addfinalizer(partial(set_measuring, Measuring.ON))
    set_measuring(Measuring.OFF)
    launches = len(gpu.launches)
    assert block(gpu, kernel, 1000) == 128  # the first of the list
    assert len(gpu.launches) == launches + 1
    facts, unknown = warnings_of(caplog)
    assert "the facts of its GPU" in facts
    assert "nothing was measured for n=1000 (fp32 float), and the warm-up did not launch it" in unknown
    with pytest.raises(UsageError, match="is strict, but none of its 6 configs was measured"):
        block(gpu, decorated(strict=True), 1000)


def test_launches_that_tell_nothing_are_not_raced(gpu: FakeGpu, path: Path) -> None:
    """As of an expert without tokens, or a warm-up of few."""
    gpu.time_us = by_size
    for length, before in ((0, 128), (16, 512)):  # the first of the list, then what the process before has measured
        kernel = lengthless()
        assert block(gpu, kernel, length) == before
        assert not measured(gpu)
        assert block(gpu, kernel, 1 << 20) == 512
        assert bool(measured(gpu)) is (length == 0)
    with ResultStore.open(path) as store:
        (best,) = store.kernel_bests()
    assert LaunchSize.stored(best.shape.problem) == LaunchSize(programs=(1 << 20) // 128, tensor_bytes=4 << 20)


def test_a_grid_of_one_that_no_config_decides_is_raced(gpu: FakeGpu) -> None:
    for fixed in ((1,), lambda meta: (1,)):
        kernel = decorated(configs=CONFIGS[:3])
        kernel[fixed](torch.ones(100), 100 if callable(fixed) else 99, 2.0)
        assert kernel.best_config.kwargs == {"BLOCK": 256}
        assert len(measured(gpu)) == 3


@pytest.mark.parametrize("processes", ["one", "several"])
def test_a_far_size_is_raced_once_and_told(processes: str, gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    gpu.time_us = by_size
    kernel = lengthless()
    assert block(gpu, kernel, 4000) == 128
    measured(gpu)
    for length, best in ((2000, 128), (16_000, 128), (1 << 20, 512), (1 << 19, 512), (4000, 128)):
        kernel = kernel if processes == "one" else lengthless()
        assert block(gpu, kernel, length) == best
        assert bool(measured(gpu)) is (length == 1 << 20)
    (warning,) = [text for text in warnings_of(caplog) if "another size" in text]
    assert "is not used, and all configs are raced once for (fp32 /16 float), with 8192 programs on" in warning


def test_a_strict_launch_of_a_far_size_is_served(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    gpu.time_us = by_size
    block(gpu, lengthless(), 4000)
    measured(gpu)
    kernel = lengthless(strict=True)
    assert block(gpu, kernel, 1 << 20) == 128
    assert not measured(gpu)
    (choice,) = kernel.kernel.choices.values()
    assert choice.rung is Rung.EXACT
    (warning,) = [text for text in warnings_of(caplog) if "another size" in text]
    assert "is used for" in warning


def test_winners_of_before_serve_launches_of_any_size(gpu: FakeGpu, path: Path) -> None:
    """Version 0.1 stored no sizes."""
    gpu.time_us = by_size
    block(gpu, lengthless(), 4000)
    with ResultStore.open(path) as store:
        (best,) = store.kernel_bests()
        unsized = replace(best.shape, problem=best.shape.problem.without(PROGRAMS, BYTES))
        store.remove_best(best)
        store.set_best(replace(best, shape=unsized))
    assert LaunchSize.stored(unsized.problem) is None
    measured(gpu)
    assert block(gpu, lengthless(), 1 << 20) == 128
    assert not measured(gpu)


def test_near_and_far_sizes() -> None:
    size = LaunchSize(100, 1000)
    assert size.is_near(LaunchSize(400, 250))
    assert not size.is_near(LaunchSize(401, 1000))
    assert not size.is_near(LaunchSize(100, 249))
    assert LaunchSize(1, 8, is_trivial=True).is_near(LaunchSize(0, 0, is_trivial=True))
    assert not LaunchSize(1, 8, is_trivial=True).is_near(LaunchSize(1, 8))


def slow_bench(launch: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
    launch()
    return [1.0] * len(quantiles)


@pytest.mark.parametrize(
    "method",
    [{"l2": "warm"}, {"max_spill_bytes": 64}, {"do_bench": slow_bench}, {"post_hook": lambda named, exception: None}],
    ids=lambda method: next(iter(method)),
)
def test_what_was_measured_in_another_way_is_measured_again(method: dict[str, Any], gpu: FakeGpu) -> None:
    for options, is_raced in (({}, True), (method, True), ({}, False), (method, False)):
        decorated(**options)[grid](torch.ones(1000), 1000, 2.0)
        raced = len({(launch.arguments["BLOCK"], launch.num_warps) for launch in gpu.launches}) > 1
        gpu.launches.clear()
        assert raced is is_raced


def test_the_same_holds_for_hooks_of_configs_and_under_install(gpu: FakeGpu) -> None:
    hooked = [triton.Config({"BLOCK": size}, num_warps=2, pre_hook=lambda named: None) for size in (128, 256)]
    plain = [triton.Config({"BLOCK": size}, num_warps=2) for size in (128, 256)]
    for configs, settings, timed in (
        (plain, Settings(), 2),
        (hooked, Settings(), 2),
        (plain, Settings(), 0),
        (plain, Settings(l2="warm"), 2),
    ):
        install(settings=settings)
        triton.autotune(configs, ["n"])(scale_kernel.fn)[grid](torch.ones(1000), 1000, 2.0)
        assert len(measured(gpu)) == timed

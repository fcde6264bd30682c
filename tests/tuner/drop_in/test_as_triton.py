"""What a program finds that knows `triton.autotune`: its arguments, hooks, pruning, prints and listeners."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from triton import knobs

from blocktune.tuner.drop_in.autotune import autotune
from tests.support.fakes.fake_triton import FakeGpu, Launch
from tests.support.libraries.autotuned_kernels import CONFIGS, row_kernel, sum_kernel
from tests.support.triton_modes import compiled_here
from tests.tuner.drop_in.conftest import decorated, grid, measured

pytestmark = compiled_here


def test_the_arguments_are_those_of_triton_and_more_by_name() -> None:
    stock, ours = (list(inspect.signature(function).parameters.values()) for function in (triton.autotune, autotune))
    positional = [each for each in ours if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [each.name for each in positional] == [each.name for each in stock]
    assert [each.default for each in positional[2:]] == [each.default for each in stock[2:]]


def test_what_is_tuned_is_told_where_triton_would_tell_it(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(knobs.autotuning, "print", True)
    monkeypatch.setattr(knobs.autotuning, "listener", lambda **words: told.append(words), raising=False)
    for _ in range(2):  # the second one knows the winner
        decorated()[grid](torch.ones(1000), 1000, 2.0)
    (said,) = capsys.readouterr().out.split("Triton autotuning for function ")[1:]
    assert said.startswith("scale_kernel,\nwith key as n=1000")
    assert "best config selected: BLOCK: 256, num_warps: 2" in said
    assert [words["cache_hit"] for words in told] == [False, True]
    assert len(told[0]["configs_timings"]) == len(CONFIGS)


@pytest.mark.parametrize("switch", ["ours", "Triton's"])
def test_one_line_says_how_a_race_ended(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], switch: str
) -> None:
    if switch == "ours":
        monkeypatch.setenv("BLOCKTUNE_PRINT", "1")
    else:
        monkeypatch.setattr(knobs.autotuning, "print", True)
    broken = triton.Config({"BLOCK": 100}, num_warps=2)  # no power of two
    for _ in range(2):  # the second one knows the winner
        decorated(configs=[*CONFIGS, broken])[grid](torch.ones(1000), 1000, 2.0)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("blocktune: "))
    assert line.startswith(
        "blocktune: scale_kernel BLOCK=256 num_stages=3 num_warps=2 for n=1000 (fp32 float), 110.0 us"
    )
    assert " us +- 0.0 %, 2.16 times as fast as the first config; " in line
    assert "; 6 raced in " in line
    assert "1 dropped: 1 compile_error (scale_kernel BLOCK=100 num_stages=3 num_warps=2: " in line


def doubling(launch: Launch) -> None:
    launch.arguments["x"].mul_(launch.arguments["factor"])


@pytest.mark.parametrize("how", ["restore_value", "hooks"])
def test_arguments_are_restored_between_measurements(gpu: FakeGpu, how: str) -> None:
    kept: list[torch.Tensor] = []
    hooks = {
        "pre_hook": lambda named, reset_only=False: None if reset_only else kept.append(named["x"].clone()),
        "post_hook": lambda named, exception: named["x"].copy_(kept.pop()),
    }
    gpu.effect = doubling
    kernel = decorated(**({"restore_value": ["x"]} if how == "restore_value" else hooks))
    x = torch.ones(1000)
    kernel[grid](x, 1000, 2.0)
    assert torch.equal(x, torch.full((1000,), 2.0))
    assert not kept


def adding(launch: Launch) -> None:
    launch.arguments["out"].add_(1.0)


def test_arguments_are_reset_before_the_launch_that_counts(gpu: FakeGpu) -> None:
    gpu.effect = adding
    kernel, out = decorated(sum_kernel, reset_to_zero=["out"]), torch.full((1,), 7.0)
    kernel[grid](out, torch.ones(1000), 1000)
    assert out.item() == 1.0
    kernel[grid](out, torch.ones(1000), 1000)  # as of triton.autotune, what is reset is reset for measurements alone
    assert out.item() == 2.0


def test_arguments_that_are_none_need_no_restoring(gpu: FakeGpu) -> None:
    kernel = decorated(sum_kernel, reset_to_zero=["out"], restore_value=["x"])
    hooks: dict[str, Any] = {"out": None, "x": None}
    kernel.pre_hook(hooks)
    kernel.post_hook(hooks, exception=None)


def test_heuristics_and_pruning_see_what_they_see_under_triton(gpu: FakeGpu) -> None:
    seen: list[Any] = []

    def prune(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
        seen.append((sorted(named), sorted(kwargs)))
        return [config for config in configs if config.kwargs["BLOCK"] < 256]

    kernel = decorated(sum_kernel, prune_configs_by={"early_config_prune": prune})
    kernel[grid](torch.zeros(1), torch.ones(1024), 1024)
    assert seen == [(["n", "out", "x"], ["grid", "warmup"])]
    assert {block for block, _ in measured(gpu)} == {128}
    assert gpu.launches[-1].arguments["IS_EVEN"] is True


def test_the_hook_of_a_stored_config_is_that_of_the_list(gpu: FakeGpu) -> None:
    seen: list[int] = []
    configs = [
        triton.Config({"BLOCK": block}, num_warps=2, pre_hook=lambda named: seen.append(named["BLOCK"]))
        for block in (128, 256)
    ]
    x = torch.ones(1000)
    decorated(configs=configs)[grid](x, 1000, 2.0)
    seen.clear()
    decorated(configs=configs)[grid](x, 1000, 2.0)
    assert seen == [256]


def test_descriptors_get_the_blocks_of_each_config(gpu: FakeGpu) -> None:
    """As libraries have it that load by host descriptors: hooks of the configs give them their blocks."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    def set_blocks(named: dict[str, Any]) -> None:
        named["rows"].block_shape = [1, named["BLOCK"]]

    configs = [triton.Config({"BLOCK": block}, num_warps=2, pre_hook=set_blocks) for block in (64, 128, 256)]
    kernel = autotune(configs, ["n"])(row_kernel)
    rows = TensorDescriptor(torch.zeros(8, 1024), [8, 1024], [1024, 1], [1, 1])
    kernel[(8,)](rows, torch.zeros(8), 1024)
    (choice,) = kernel.kernel.choices.values()
    assert (choice.config.parameters["BLOCK"], choice.dropped) == (256, {})
    assert {block for block, _ in measured(gpu)} == {64, 128, 256}
    for descriptor in (rows, TensorDescriptor(torch.zeros(8, 1024), [8, 1024], [1024, 1], [1, 1])):
        kernel[(8,)](descriptor, torch.zeros(8), 1024)
        assert descriptor.block_shape == [1, 256]
    assert kernel.kernel.misses == 1
    assert not measured(gpu)


def test_a_bench_of_the_kernels_own_decides(gpu: FakeGpu) -> None:
    def slowest(launch: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
        launch()
        return [1000.0 / gpu.time_us(gpu.launches[-1])] * len(quantiles)

    kernel = decorated(do_bench=slowest)
    kernel[grid](torch.ones(1000), 1000, 2.0)
    assert (kernel.best_config.kwargs["BLOCK"], kernel.best_config.num_warps) == (512, 4)

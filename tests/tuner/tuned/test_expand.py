"""A search around the listed configs: what is faster is found, what computes something else is not taken."""

from typing import Any

import pytest
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from blocktune.kernels.tuned.config import UserConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.tuned.autotune import autotune
from blocktune.tuner.tuned.neighbours import neighbours
from tests.support.autotuned_kernels import row_kernel, scale_kernel
from tests.support.fake_triton import FakeGpu, Launch
from tests.support.triton_modes import compiled_here

pytestmark = compiled_here

LIST = [triton.Config({"BLOCK": block}, num_warps=4, num_stages=3) for block in (1024, 2048)]


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def decorated(**options: Any) -> Any:
    return autotune(LIST, ["n"], restore_value=["x"], **options)(scale_kernel.fn)


def doubling(launch: Launch) -> None:
    launch.arguments["x"].mul_(2)


def wrong_with_one_warp(launch: Launch) -> None:
    launch.arguments["x"].mul_(3 if launch.num_warps == 1 else 2)


def test_a_search_around_the_list_finds_the_fastest(gpu: FakeGpu) -> None:
    gpu.effect = doubling
    kernel, x = decorated(expand=True), torch.ones(1000)
    kernel[grid](x, 1000, 2.0)
    assert torch.equal(x, torch.full((1000,), 2.0))
    assert (kernel.best_config.kwargs["BLOCK"], kernel.best_config.num_warps) == (256, 1)
    timed = len(gpu.timed)
    again = decorated(expand=True)
    again[grid](x, 1000, 2.0)
    assert again.best_config == kernel.best_config
    decorated()[grid](x, 1000, 2.0)  # the list alone is another question
    assert gpu.launches[-1].arguments["BLOCK"] == 1024
    assert len(gpu.timed) == timed


def test_a_search_goes_on_from_a_list_that_was_measured(gpu: FakeGpu) -> None:
    gpu.effect = doubling
    decorated()[grid](torch.ones(1000), 1000, 2.0)
    timed = len(gpu.timed)
    kernel = decorated(expand=True)
    kernel[grid](torch.ones(1000), 1000, 2.0)
    assert (kernel.best_config.kwargs["BLOCK"], kernel.best_config.num_warps) == (256, 1)
    assert 2048 not in {launch.arguments["BLOCK"] for launch in gpu.timed[timed:]}  # it was slow before


def test_a_config_that_computes_something_else_is_not_taken(gpu: FakeGpu) -> None:
    gpu.effect = wrong_with_one_warp
    kernel, x = decorated(expand=True), torch.ones(1000)
    kernel[grid](x, 1000, 2.0)
    assert torch.equal(x, torch.full((1000,), 2.0))
    assert (kernel.best_config.kwargs["BLOCK"], kernel.best_config.num_warps) == (256, 2)
    (choice,) = kernel.kernel.choices.values()
    wrong = [reason for label, reason in choice.dropped.items() if "num_warps=1" in label]
    assert wrong
    assert all("`x` differs from what the first config computes by 5.0e-01" in reason for reason in wrong)


def test_what_is_stored_by_descriptors_is_compared_too(gpu: FakeGpu) -> None:
    def set_blocks(named: dict[str, Any]) -> None:
        named["rows"].block_shape = [1, named["BLOCK"]]

    def wrong_with_two_warps(launch: Launch) -> None:
        launch.arguments["rows"].base.fill_(3 if launch.num_warps == 2 else 2)

    gpu.effect = wrong_with_two_warps
    configs = [triton.Config({"BLOCK": 256}, num_warps=4, num_stages=3, pre_hook=set_blocks)]
    kernel = autotune(configs, ["n"], expand=True)(row_kernel)
    kernel[(8,)](TensorDescriptor(torch.zeros(8, 1024), [8, 1024], [1024, 1], [1, 1]), torch.zeros(8), 1024)
    (choice,) = kernel.kernel.choices.values()
    wrong = [label for label, reason in choice.dropped.items() if "`rows` differs" in reason]
    assert wrong
    assert all("num_warps=2" in label for label in wrong)
    assert kernel.best_config.num_warps != 2


def test_the_budget_bounds_the_search(gpu: FakeGpu) -> None:
    gpu.effect = doubling
    decorated(expand=3)[grid](torch.ones(1000), 1000, 2.0)
    configs = {(launch.arguments["BLOCK"], launch.num_warps, launch.num_stages) for launch in gpu.timed}
    assert len(configs) <= len(LIST) + 3
    with pytest.raises(UsageError, match="`expand` compares the results"):
        decorated(expand=3, isolate=True)


def test_neighbours_differ_in_a_step() -> None:
    config = UserConfig(
        "m:f", (("BLOCK", 16), ("EVEN", True), ("GROUP", 8), ("ODD", 48), ("num_warps", 16), ("num_stages", 1))
    )
    found = [dict(set(each.values) - set(config.values)) for each in neighbours(config)]
    assert found == [{"BLOCK": 32}, {"num_stages": 2}, {"num_warps": 8}]

"""A search around the listed configs: what is faster is found, what computes something else is not taken."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.errors import StoreError, UsageError
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.runtime.autotuned.frozen import known_rows
from blocktune.runtime.autotuned.kernel import forget_choices
from blocktune.tuner.drop_in import tune_call
from blocktune.tuner.drop_in.autotune import autotune
from blocktune.tuner.subject.neighbours import further_neighbours, neighbours, with_capped_registers
from tests.support.fakes.fake_triton import FakeGpu, Launch
from tests.support.libraries.autotuned_kernels import row_kernel, scale_kernel
from tests.support.triton_modes import compiled_here
from tests.tuner.drop_in.conftest import H200

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
    kernel, x = decorated(expand=True), torch.ones(5000)
    kernel[grid](x, 5000, 2.0)
    assert torch.equal(x, torch.full((5000,), 2.0))
    assert (kernel.best_config.kwargs["BLOCK"], kernel.best_config.num_warps) == (256, 1)
    (choice,) = kernel.kernel.choices.values()
    assert min(choice.times_us, key=choice.times_us.__getitem__) == choice.config
    assert len(choice.times_us) > len(LIST)
    timed = len(gpu.timed)
    again = decorated(expand=True)
    again[grid](x, 5000, 2.0)
    assert again.best_config == kernel.best_config
    decorated()[grid](x, 5000, 2.0)  # the list alone is another question
    assert gpu.launches[-1].arguments["BLOCK"] == 1024
    assert len(gpu.timed) == timed


def test_a_search_goes_on_from_a_list_that_was_measured(gpu: FakeGpu) -> None:
    gpu.effect = doubling
    decorated()[grid](torch.ones(5000), 5000, 2.0)
    timed = len(gpu.timed)
    kernel = decorated(expand=True)
    kernel[grid](torch.ones(5000), 5000, 2.0)
    assert (kernel.best_config.kwargs["BLOCK"], kernel.best_config.num_warps) == (256, 1)
    assert 2048 not in {launch.arguments["BLOCK"] for launch in gpu.timed[timed:]}  # it was slow before


def test_a_config_that_computes_something_else_is_not_taken(gpu: FakeGpu) -> None:
    gpu.effect = wrong_with_one_warp
    kernel, x = decorated(expand=True), torch.ones(5000)
    kernel[grid](x, 5000, 2.0)
    assert torch.equal(x, torch.full((5000,), 2.0))
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
    decorated(expand=3)[grid](torch.ones(5000), 5000, 2.0)
    configs = {(launch.arguments["BLOCK"], launch.num_warps, launch.num_stages) for launch in gpu.timed}
    assert len(configs) <= len(LIST) + 3
    with pytest.raises(UsageError, match="`expand` and `isolate` cannot be combined"):
        decorated(expand=3, isolate=True)


def test_two_steps_that_make_up_for_each_other_are_tried_where_one_is_not_faster(gpu: FakeGpu) -> None:
    def time_us(launch: Launch) -> float:
        return 50.0 if (launch.arguments["BLOCK"], launch.num_warps) == (2048, 8) else 100.0 + launch.num_warps / 10

    gpu.effect, gpu.time_us = doubling, time_us
    kernel = autotune(LIST[:1], ["n"], restore_value=["x"], expand=True)(scale_kernel.fn)
    kernel[grid](torch.ones(5000), 5000, 2.0)
    assert (kernel.best_config.kwargs["BLOCK"], kernel.best_config.num_warps) == (2048, 8)


def test_equal_code_is_not_measured_again(gpu: FakeGpu) -> None:
    """Without a loop stages change nothing."""
    gpu.effect = doubling
    scale_kernel.fn.device_caches.clear()  # what this process has launched is not compiled ahead, nor compared
    kernel = decorated(expand=True)
    kernel[grid](torch.ones(5000), 5000, 2.0)
    assert {launch.num_stages for launch in gpu.timed} == {3}
    assert len({launch.num_warps for launch in gpu.timed}) > 2


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("put_all", "Measurements wait in"),
        ("trials", "without a store of its results"),
        ("best", "without a store of its results"),
    ],
)
def test_a_store_that_fails_during_a_search_costs_a_warning(
    method: str, words: str, gpu: FakeGpu, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = getattr(ResultStore, method)

    def fail(store: ResultStore, *arguments: Any, **options: Any) -> Any:
        if store.target.path == path:
            raise StoreError("no answer")
        return answer(store, *arguments, **options)

    monkeypatch.setattr(ResultStore, method, fail)
    gpu.effect = doubling
    kernel, x = decorated(expand=True), torch.ones(5000)
    with caplog.at_level(logging.WARNING, "blocktune"):
        kernel[grid](x, 5000, 2.0)
    assert torch.equal(x, torch.full((5000,), 2.0))
    assert (kernel.best_config.kwargs["BLOCK"], kernel.best_config.num_warps) == (256, 1)
    assert words in caplog.text


@pytest.mark.parametrize("place", ["/dev/null/x.db", "winners.json"])
def test_without_a_store_the_process_keeps_the_winner(
    place: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away = replace(tune_call.machine(), open_store=lambda _: ResultStore.open(place))
    monkeypatch.setattr(tune_call, "machine", lambda: away)
    gpu.effect = doubling
    kernel = decorated(expand=True)
    with caplog.at_level(logging.WARNING, "blocktune"):
        kernel[grid](torch.ones(5000), 5000, 2.0)
    assert "without a store of its results" in caplog.text
    (row,) = known_rows(H200)  # which is what other ranks are sent
    assert json.loads(row["config"])["BLOCK"] == 256
    gpu.timed.clear()
    forget_choices()
    kernel[grid](torch.ones(5000), 5000, 2.0)
    assert not gpu.timed


def test_reasons_are_read_from_a_store_whose_label_hides_a_password(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResultStore, "label", "postgresql://user:***@host/results")
    gpu.effect = wrong_with_one_warp
    kernel = decorated(expand=True)
    kernel[grid](torch.ones(5000), 5000, 2.0)
    (choice,) = kernel.kernel.choices.values()
    assert choice.dropped


def test_an_interrupted_search_interrupts_the_call(gpu: FakeGpu, path: Path) -> None:
    find_time_us = gpu.time_us

    def interrupted(launch: Launch) -> float:
        if launch.num_warps == 1:
            raise KeyboardInterrupt
        return find_time_us(launch)

    gpu.effect, gpu.time_us = doubling, interrupted
    kernel = decorated(expand=True)
    with pytest.raises(KeyboardInterrupt):
        kernel[grid](torch.ones(5000), 5000, 2.0)
    with ResultStore.open(path) as store:
        assert store.kernel_bests() == []
    gpu.time_us = find_time_us
    kernel[grid](torch.ones(5000), 5000, 2.0)
    assert (kernel.best_config.kwargs["BLOCK"], kernel.best_config.num_warps) == (256, 1)


def found_around(config: LaunchConfig, *listed: LaunchConfig) -> list[dict[str, Any]]:
    """What the neighbours of a config have that it has not."""
    return [dict(set(each.values) - set(config.values)) for each in neighbours(config, listed)]


def test_neighbours_differ_in_a_step() -> None:
    config = LaunchConfig(
        "m:f", (("BLOCK", 16), ("EVEN", True), ("GROUP", 8), ("ODD", 48), ("num_warps", 16), ("num_stages", 1))
    )
    assert found_around(config) == [{"BLOCK": 32}, {"num_warps": 32}, {"num_warps": 8}, {"num_stages": 2}]


def test_small_sizes_are_changed_where_the_list_has_several() -> None:
    rows = [LaunchConfig("m:f", (("BT", size), ("HEADS", 2), ("maxnreg", 128))) for size in (8, 16, 32)]
    assert found_around(rows[0], *rows) == [{"BT": 16}, {"BT": 4}]
    assert found_around(rows[0]) == []
    odd = [LaunchConfig("m:f", (("BT", size),)) for size in (6, 8)]
    assert found_around(odd[1], *odd) == []


def test_further_neighbours_keep_the_work_of_a_thread() -> None:
    config = LaunchConfig("m:f", (("M", 64), ("N", 32), ("num_stages", 3), ("num_warps", 4)))
    found = [dict(set(each.values) - set(config.values)) for each in further_neighbours(config)]
    assert {"M": 128, "num_warps": 8} in found
    assert {"M": 128, "N": 16} in found
    assert {"M": 128, "num_stages": 2} in found
    assert {"num_stages": 5} in found
    assert {"M": 128, "num_warps": 2} not in found
    assert {"M": 128, "N": 64} not in found
    assert not any(each in found for each in found_around(config))


def test_registers_are_capped_where_they_alone_limit_the_blocks() -> None:
    config = LaunchConfig("m:f", (("BLOCK", 64), ("num_warps", 4)))
    resources = KernelResources(registers=136, shared_bytes=0, num_warps=4, tensor_cores="none")
    (capped,) = with_capped_registers(config, resources, H200.limits)
    assert capped.parameters == {"BLOCK": 64, "num_warps": 4, "maxnreg": 128}  # the fourth block of an SM
    (without,) = with_capped_registers(capped, replace(resources, shared_bytes=100_000), H200.limits)
    assert without == config

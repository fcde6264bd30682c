"""What a function launches is recorded as Triton specialises it, and nothing is launched."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.compile.compiler import resources_of
from blocktune.tuner.dry_run.recorder import DryLaunch, dry_launches
from blocktune.tuner.offline.stand_in import stand_in
from blocktune.tuner.offline.stand_in_driver import INDEX
from tests.support.libraries import launched_kernels
from tests.support.triton_modes import compiled_here

pytestmark = compiled_here

H200 = device_named("h200")


def recorded(step: Callable[[], object], device: str = "h200") -> tuple[DryLaunch, ...]:
    return dry_launches(step, device_named(device))


def specs(launch: DryLaunch) -> list[Any]:
    return [each.specialization.spec for each in launch.configs.values() if each.specialization is not None]


def test_a_size_of_one_none_functions_types_and_tuples_are_what_they_are_at_the_launch() -> None:
    first, second = recorded(launched_kernels.strided)  # the third launch is of the first kind
    (spec,) = specs(first)
    constants = {first.kernel and spec.function.arg_names[path[0]]: value for path, value in spec.constexprs.items()}
    assert spec.signature["pair"] == ("*bf16", "constexpr")
    assert (constants["stride"], constants["shift"], constants["OF"]) == (1, None, launched_kernels.doubled)
    assert first.label != second.label
    (config,) = first.configs.values()
    assert (config.programs, first.listed) == (4, 0)
    assert config.specialization is not None
    assert config.specialization.document is not None  # another process finds the function by its name


def test_every_config_of_a_list_is_recorded_with_what_heuristics_compute() -> None:
    even, odd = recorded(launched_kernels.even)
    assert (even.listed, len(even.configs), len(odd.configs)) == (4, 4, 4)
    for launch, expected in ((even, True), (odd, False)):
        assert {spec.constexprs[4,] for spec in specs(launch)} == {expected}
    assert [each.programs for each in even.configs.values()] == [8, 8, 2, 2]


def test_a_tuner_with_a_run_of_its_own_is_recorded_by_its_list() -> None:
    (launch,) = recorded(launched_kernels.tuned_by_its_own)
    assert (launch.listed, len(launch.configs)) == (4, 4)


def test_a_backward_pass_finds_its_gradients_on_the_gpu() -> None:
    (launch,) = recorded(launched_kernels.backward)  # both passes are one kind
    assert launch.kernel == "tests.support.libraries.launched_kernels:even_kernel"


def test_tensors_on_meta_take_no_memory() -> None:
    (launch,) = recorded(launched_kernels.large)
    assert [each.programs for each in launch.configs.values()] == [1 << 37, 1 << 37, 1 << 35, 1 << 35]


def test_what_a_device_refuses_is_a_config_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [*launched_kernels.CONFIGS[:1], launched_kernels.triton.Config({"BLOCK": 128}, num_ctas=2)]
    monkeypatch.setattr(launched_kernels.even_kernel, "configs", configs)
    (launch, _) = recorded(launched_kernels.even, "a100")
    assert [bool(each.problem) for each in launch.configs.values()] == [False, True]


@pytest.mark.parametrize("step", [launched_kernels.strided, launched_kernels.even, launched_kernels.product])
def test_what_triton_compiles_for_the_launch_is_among_what_was_recorded(
    step: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        each.specialization.key: each
        for launch in recorded(step)
        for each in launch.configs.values()
        if each.specialization
    }
    compiled, stock = [], JITFunction.run

    def run(*args: Any, **kwargs: Any) -> Any:
        compiled.append(stock(*args, **kwargs))

    monkeypatch.setattr(JITFunction, "run", run)
    with stand_in(H200):
        step()
    assert compiled
    assert all(kernel.hash in keys for kernel in compiled)
    assert all(resources_of(kernel).registers for kernel in compiled)


@pytest.mark.parametrize("code", [None, 0])
def test_a_function_that_ends_its_program_has_the_launches_until_then(code: int | None) -> None:
    def leaves() -> None:
        launched_kernels.even()
        sys.exit(code)

    assert len(recorded(leaves)) == 2


@pytest.mark.parametrize(
    ("first", "code", "message"),
    [
        (launched_kernels.even, 3, r"called sys.exit\(3\) after 2 kinds of launches"),
        (launched_kernels.even, "no luck", r"called sys.exit\('no luck'\) after 2 kinds of launches"),
        (launched_kernels.launches_nothing, None, r"called sys.exit\(\) after 0 kinds of launches"),
    ],
    ids=["code", "words", "no launches"],
)
def test_an_exit_that_is_a_failure_fails(first: Callable[[], object], code: object, message: str) -> None:
    def leaves() -> None:
        first()
        sys.exit(code)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match=message):
        recorded(leaves)


def test_nothing_of_the_gpu_is_left() -> None:
    before = (driver._active, torch.cuda.is_available, JITFunction.run, torch.library.Library.impl)
    with pytest.raises(UsageError, match=r"raised RuntimeError: no luck at .*launched_kernels.py:\d+, after 2 kinds"):
        recorded(launched_kernels.fails)
    assert (driver._active, torch.cuda.is_available, JITFunction.run, torch.library.Library.impl) == before
    assert INDEX not in launched_kernels.even_kernel.fn.fn.device_caches
    assert torch.ones(1, device="cpu").device.type == "cpu"

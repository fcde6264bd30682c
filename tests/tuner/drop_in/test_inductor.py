"""torch.compile with autotuned kernels: PyTorch traces them and Inductor generates its code; a fake stands where that
is compiled and launched."""

import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._triton
from torch.library import triton_op, wrap_triton
from triton import Config

import blocktune
from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.autotuned.frozen import forget_frozen, known_rows, take
from blocktune.runtime.autotuned.kernel import forget_choices
from blocktune.tuner.drop_in import inductor
from blocktune.tuner.drop_in.autotune import autotune
from tests.support.fakes.fake_triton import FakeGpu
from tests.support.libraries.autotuned_kernels import CONFIGS, scale_kernel, sum_kernel
from tests.support.triton_modes import compiled_here
from tests.tuner.drop_in.conftest import grid, measured

pytestmark = compiled_here

scale = autotune(CONFIGS, ["n"])(scale_kernel.fn)

Lists = list[list[dict[str, Any]]]


class Generated:
    """Stands where a kernel of Inductor's stands."""

    def run(self, *args: object, **kwargs: object) -> None:
        """Launch nothing."""


@pytest.fixture
def lists(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lists]:
    """The lists of configs in the code that Inductor generates, one a kernel."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    found: Lists = []

    def generated(self: Any, name: str, source: str, device_str: str) -> Generated:
        (configs,) = re.findall(r"configs=(\[\{.*?\}\]),\n", source)[:1]
        found.append(eval(configs))
        return Generated()

    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda: True)
    monkeypatch.setattr(AsyncCompile, "triton", generated)
    torch._dynamo.reset()
    forget_choices()
    with config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its caches are off
        yield found
    torch._dynamo.reset()


def scaled(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    scale[grid](y, x.numel(), 2.0)
    return y + 1


def added_up(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(1)
    sum_kernel[lambda meta: ((x.numel() + meta["BLOCK"] - 1) // meta["BLOCK"],)](out, x, x.numel())
    return out + 1


BEST = {"BLOCK": 256, "num_warps": 2, "num_stages": 3}


def test_inductor_gets_the_winner_that_the_store_knows(gpu: FakeGpu, lists: Lists) -> None:
    scaled(torch.ones(1000))
    measured(gpu)
    for dynamic in (False, True):
        torch._dynamo.reset()
        torch.compile(scaled, fullgraph=True, dynamic=dynamic)(torch.ones(1000))
    assert lists == [[BEST], [BEST]]
    assert not measured(gpu)


def test_heuristics_of_a_library_under_install_stay_with_the_winner(gpu: FakeGpu, lists: Lists) -> None:
    blocktune.install()
    added_up(torch.ones(1024))
    torch.compile(added_up, fullgraph=True)(torch.ones(1024))
    assert lists == [[BEST | {"IS_EVEN": True}]]
    blocktune.uninstall()
    torch._dynamo.reset()
    torch.compile(added_up, fullgraph=True)(torch.ones(1024))
    assert len(lists[1]) == len(CONFIGS)


def test_kernels_in_operators_have_their_winner_too(gpu: FakeGpu, lists: Lists) -> None:
    @triton_op("blocktune_tests::scaled", mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        wrap_triton(scale)[grid](y, x.numel(), 2.0)
        return y

    scaled(torch.ones(1000))
    torch.compile(operator, fullgraph=True)(torch.ones(1000))
    assert lists == [[BEST]]


def test_frozen_winners_serve(gpu: FakeGpu, lists: Lists, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled(torch.ones(1000))
    rows = known_rows(device_named("h200"))
    monkeypatch.setenv("BLOCKTUNE_DB", str(path.with_name("another.db")))
    forget_frozen()
    take(rows)
    torch.compile(scaled, fullgraph=True)(torch.ones(1000))
    assert lists == [[BEST]]


def test_a_list_without_a_known_winner_is_inductors(
    gpu: FakeGpu, lists: Lists, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "blocktune"):
        torch.compile(scaled, fullgraph=True)(torch.ones(1000))
    assert len(lists[0]) == len(CONFIGS)
    assert "no winner is known for n=1000 (fp32 float), so that Inductor measures the whole list" in caplog.text


def test_a_winner_of_a_far_size_is_none(gpu: FakeGpu, lists: Lists) -> None:
    def scaled_in_part(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        scale[grid](y, 1000, 2.0)
        return y

    scaled_in_part(torch.ones(1000))
    torch.compile(scaled_in_part, fullgraph=True)(torch.ones(100_000))
    assert len(lists[0]) == len(CONFIGS)


def test_strict_kernels_are_not_compiled_without_a_winner(
    gpu: FakeGpu, lists: Lists, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKTUNE_STRICT", "1")
    with pytest.raises(Exception, match="is strict, but none of its 6 configs was measured for n=1000"):
        torch.compile(scaled, fullgraph=True)(torch.ones(1000))
    assert not lists


def test_one_config_needs_no_winner(gpu: FakeGpu, lists: Lists, caplog: pytest.LogCaptureFixture) -> None:
    alone = autotune([Config({"BLOCK": 128})], ["n"])(scale_kernel.fn)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        alone[grid](y, 1000, 2.0)
        return y

    torch.compile(step, fullgraph=True)(torch.ones(1000))
    assert len(lists[0]) == 1
    assert "no winner" not in caplog.text


def test_a_look_for_pytorchs_module_leaves_it_to_be_changed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    finder, name = inductor._TracingFinder(), inductor._TRACING
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, name)
    for _ in range(2):
        assert importlib.util.find_spec(name) is not None
    assert finder in sys.meta_path

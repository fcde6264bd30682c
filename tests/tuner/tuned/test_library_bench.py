"""The bench of libraries' kernels on a fake GPU: what it finds, how it goes on, and what its processes say."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from tests.support import library_steps
from tests.support.autotuned_kernels import scale_kernel, sum_kernel
from tests.support.fake_triton import FakeGpu, FakeTurnClock
from tests.support.programs import library_bench, library_starts
from tests.support.triton_modes import compiled_here
from tests.tuner.tuned.conftest import H200

pytestmark = compiled_here


def step(device: str) -> None:
    """Launch two kernels, one of them twice."""
    x = torch.ones(1000)
    for _ in range(2):
        scale_kernel[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, 1000, 2.0)
    sum_kernel[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](torch.zeros(1), x, 1000)


@pytest.fixture
def bench(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The bench on a fake GPU, of a step of ours; Triton's own tuner takes the largest block for the fastest."""
    monkeypatch.setattr(library_bench, "CudaTurnClock", lambda l2: FakeTurnClock(gpu))
    monkeypatch.setattr(library_bench, "current_device", lambda: H200)
    monkeypatch.setattr(library_bench.importlib.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(library_bench, "EXPAND", 4)
    monkeypatch.setattr(library_steps, "STEPS", {"ours": step})

    def bench_of_stock(call: Any, quantiles: Any) -> list[float]:
        call()
        return [1.0 / gpu.launches[-1].arguments["BLOCK"]] * len(quantiles)

    for kernel in (scale_kernel, sum_kernel):
        kernel.cache.clear()
        monkeypatch.setitem(kernel.__dict__, "do_bench", bench_of_stock)
    return gpu


def test_winners_are_compared_with_every_config_and_with_stock(bench: FakeGpu, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    library_bench.winners(path, ["ours"], 100.0)
    document = json.loads(path.read_text())
    assert [row["kernel"].rpartition(":")[2] for row in document["kernels"]] == ["scale_kernel", "sum_kernel"]
    for row in document["kernels"]:
        assert (row["winner"]["time_us"], row["winner"]["over_best"], row["same_of_repeats"]) == (110.0, 0.0, 10)
        assert row["stock"]["time_us"] == 366.0
        assert row["stock"]["over_best"] == pytest.approx(366 / 110 - 1)
        assert (row["expanded"]["time_us"], row["wrong"]) == (105.0, "")  # one warp is in no list
        assert row["expanded"]["gain"] == pytest.approx(366 / 105)
    timed = len(bench.timed)
    library_bench.winners(path, ["ours"], 100.0)  # goes on where it stopped
    assert len(bench.timed) == timed


def test_a_bench_ends_when_its_seconds_are_over(
    bench: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library_bench.winners(tmp_path / "bench.json", ["ours"], -1.0)
    assert "run this again for the rest" in capsys.readouterr().out
    assert not bench.timed


def test_processes_that_disagree_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(
        [
            {"step_seconds": 3.0, "tuned": 2, "choices": {"a": "BLOCK=1", "b": "BLOCK=1"}},
            {"step_seconds": 4.0, "tuned": 0, "choices": {"a": "BLOCK=1", "b": "BLOCK=2"}},
            None,
        ]
    )
    monkeypatch.setattr(library_starts, "started", lambda *_: SimpleNamespace())
    monkeypatch.setattr(library_starts, "answer_of", lambda *_: next(said))
    assert library_starts.agreement("fla", 3, 10.0) == {
        "processes": 3,
        "ended": 2,
        "kinds_of_calls": 2,
        "tuned_in_all": 2,
        "disagreements": 1,
        "seconds": 4.0,
    }

"""`blocktune.autotune` on a fake GPU: Triton specialises and compiles as always, and launches are counted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import blocktune
from blocktune.db.records.records import Outcome, Telemetry
from blocktune.db.store import ResultStore
from blocktune.kernels.files import variables
from blocktune.kernels.values.errors import NoFeasibleConfigError, UsageError
from blocktune.runtime.autotuned import summary
from blocktune.runtime.autotuned.launches import read_launches
from blocktune.runtime.selection.ladder import Rung
from blocktune.tuner.drop_in.autotune import autotune, space
from blocktune.tuner.measure.telemetry import GpuMonitor
from tests.support.fakes.fake_triton import FakeGpu
from tests.support.libraries.autotuned_kernels import CONFIGS, scale_kernel
from tests.support.triton_modes import compiled_here
from tests.tuner.drop_in.conftest import H200, decorated, grid, measured

pytestmark = compiled_here


def test_the_fastest_config_is_launched_and_kept(gpu: FakeGpu, path: Path) -> None:
    kernel, x = decorated(), torch.ones(1000)
    kernel[grid](x, 1000, 2.0)
    last = gpu.launches[-1]
    assert (last.arguments["BLOCK"], last.num_warps, last.grid) == (256, 2, (4, 1, 1))
    assert len(measured(gpu)) == len(CONFIGS)
    assert kernel.best_config.kwargs == {"BLOCK": 256}
    assert kernel.best_config in kernel.cache.values()

    launches = len(gpu.launches)
    kernel[grid](x, 1000, 3.0)  # a hit
    decorated()[grid](x, 1000, 2.0)  # another process
    assert len(gpu.launches) == launches + 2
    assert not measured(gpu)

    found = kernel.explain(x, 1000, 2.0)
    assert (found.rung, found.time_us, found.default_time_us) == (Rung.EXACT, 110.0, 238.0)
    with ResultStore.open(path) as store:
        (best,) = store.kernel_bests(H200)
        problem = best.shape.of_any_list
        trials = store.trials(H200, problem, environment=best.environment, kernel_hash=best.kernel_hash)
    assert problem.label == "n=1000 (fp32 float) 8 programs"
    assert best.config.kernel == "tests.support.libraries.autotuned_kernels:scale_kernel"
    assert best.speedup_over_default == pytest.approx(238 / 110)
    assert len(trials) == len(CONFIGS)
    assert {trial.outcome for trial in trials} == {Outcome.OK}


def test_a_config_that_is_added_costs_one_measurement(gpu: FakeGpu) -> None:
    x = torch.ones(1000)
    decorated(configs=CONFIGS[:4])[grid](x, 1000, 2.0)
    assert measured(gpu) == {(128, 2), (128, 4), (256, 2), (256, 4)}
    wider = decorated(configs=[*CONFIGS[:4], triton.Config({"BLOCK": 256}, num_warps=1)])
    wider[grid](x, 1000, 2.0)
    assert measured(gpu) <= {(256, 1), (256, 2), (256, 4)}  # the new one, against the best of before
    assert wider.best_config.num_warps == 1
    decorated(configs=CONFIGS[:2])[grid](x, 1000, 2.0)
    assert not measured(gpu) - {(128, 2), (128, 4)}


def test_what_makes_another_question_is_measured_for_itself(gpu: FakeGpu) -> None:
    kernel, x = decorated(), torch.ones(1001)
    kernel[grid](x, 1000, 2.0)
    measured(gpu)
    kernel[grid](x, 512, 2.0)
    assert measured(gpu)
    kernel[grid](x[1:], 1000, 2.0)
    assert measured(gpu)
    kernel[grid](x.double(), 1000, 2.0)
    assert measured(gpu)
    assert kernel.kernel.misses == 4


def test_trials_tell_the_state_of_the_gpu(gpu: FakeGpu, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Telemetry(sm_clock_mhz=1980, temperature_c=45, throttle_reasons=4)
    monkeypatch.setattr(GpuMonitor, "sample", lambda _: state)
    kernel = decorated()
    kernel[grid](torch.ones(1000), 1000, 2.0)
    with ResultStore.open(path) as store:
        (best,) = store.kernel_bests(H200)
        problem = best.shape.of_any_list
        trials = store.trials(H200, problem, environment=best.environment, kernel_hash=best.kernel_hash)
    found = {
        (state.sm_clock_mhz, state.temperature_c, state.throttle_reasons, state.other_processes)
        for state in (trial.telemetry for trial in trials)
    }
    assert found == {(1980, 45, 4, None)}


def test_launches_are_counted_over_processes(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second tuner stands for another process: it finds the winner in the store. What `forget` drops counts, too."""
    path = tmp_path / "launches.jsonl"
    monkeypatch.setenv("BLOCKTUNE_LAUNCHES", str(path))
    for hits, misses in ((3, 1), (4, 0)):
        kernel = decorated()
        for _ in range(2):
            kernel[grid](torch.ones(1000), 1000, 2.0)
            kernel[grid](torch.ones(1000), 1000, 2.0)
            kernel.kernel.forget()
        ((kind, launches),) = kernel.kernel.table.launches.items()
        assert (kind.kernel, launches.hits, launches.misses) == (kernel.kernel.name, hits, misses)
        assert (launches.seconds > 0) == bool(misses)
        monkeypatch.setattr(summary, "kernels", [kernel.kernel])
        summary.keep_launches()
    (counted,) = read_launches(path).values()
    assert (counted.hits, counted.misses) == (7, 1)


def test_a_place_that_cannot_be_written_costs_the_counts(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_LAUNCHES", "/proc/nowhere/launches.jsonl")
    kernel = decorated()
    kernel[grid](torch.ones(1000), 1000, 2.0)
    monkeypatch.setattr(summary, "kernels", [kernel.kernel])
    summary.keep_launches()


def test_what_does_not_compile_or_fit_is_dropped_with_its_reason(gpu: FakeGpu) -> None:
    broken = triton.Config({"BLOCK": 100}, num_warps=2)  # no power of two
    kernel, x = decorated(configs=[broken, *CONFIGS]), torch.ones(1000)
    kernel[grid](x, 1000, 2.0)
    (choice,) = kernel.kernel.choices.values()
    assert list(choice.dropped) == ["scale_kernel BLOCK=100 num_stages=3 num_warps=2"]
    assert "power of 2" in str(choice)
    with pytest.raises(NoFeasibleConfigError, match=r"None of the 2 configs .*: scale_kernel BLOCK=100"):
        decorated(configs=[broken, triton.Config({"BLOCK": 7})])[grid](x, 1000, 2.0)


def test_strict_refuses_to_tune(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1000)
    with pytest.raises(
        UsageError, match=r"(?s)is strict, but none of its 6 configs was measured for .* on NVIDIA H200"
    ):
        decorated(strict=True)[grid](x, 1000, 2.0)
    assert gpu.launches == []
    decorated()[grid](x, 1000, 2.0)
    monkeypatch.setenv("BLOCKTUNE_STRICT", "1")
    decorated()[grid](x, 1000, 2.0)
    with pytest.raises(UsageError, match="n=999"):
        decorated()[grid](x, 999, 2.0)


def test_an_environment_that_is_neither_strict_nor_not_is_named_and_ends_no_launch(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(variables, "_warned", set())  # another test may have met the same value
    monkeypatch.setenv("BLOCKTUNE_STRICT", "ture")
    decorated()[grid](torch.ones(1000), 1000, 2.0)
    assert gpu.launches
    assert "BLOCKTUNE_STRICT" in caplog.text
    assert "'ture'" in caplog.text


def test_other_rungs_serve_where_they_are_accepted(gpu: FakeGpu) -> None:
    x = torch.ones(1024)
    decorated()[grid](x, 512, 2.0)
    measured(gpu)
    near = decorated(accept="nearest")
    near[grid](x, 1024, 2.0)
    assert not measured(gpu)
    assert near.explain(x, 1024, 2.0).rung is Rung.NEAREST


def test_key_values_in_one_bucket_are_tuned_once(gpu: FakeGpu) -> None:
    kernel, x = decorated(buckets={"n": "power_of_two"}), torch.ones(1024)
    kernel[grid](x, 1000, 2.0)
    measured(gpu)
    kernel[grid](x, 777, 2.0)
    kernel[grid](x, 1024, 2.0)
    assert not measured(gpu)


@pytest.mark.parametrize(
    ("decorate", "message"),
    [
        (
            lambda: autotune(CONFIGS, None)(scale_kernel.fn),
            r"a config of their own, but none is given. Name them, or pass \[\]",
        ),
        (lambda: autotune(CONFIGS)(scale_kernel.fn), "`key` must name the arguments"),
        (lambda: decorated(reset_to_zero=["y"]), "`reset_to_zero` names y, but"),
        (lambda: decorated(restore_value="x"), r"`restore_value` must be a sequence of names, .* Write \['x'\]"),
        (lambda: decorated(buckets={"m": "power_of_two"}), "`buckets` names m, but"),
        (lambda: decorated(buckets={"n": "decade"}), "must be a function or 'power_of_two', but got 'decade'"),
        (lambda: decorated(buckets="power_of_two"), r"must be groups by name, but got 'power_of_two'. Write {\"n\": "),
        (lambda: decorated(accept="default"), "`accept` must be one of exact, .* but got 'default'"),
        (lambda: decorated(l2="hot"), "`l2` must be 'cold' or 'warm'"),
        (lambda: decorated(expand=-1), "`expand` must be an integer of at least 0, but got -1"),
        (lambda: decorated(wait_seconds="long"), "`wait_seconds` must be a number of at least 0, but got 'long'"),
        (lambda: decorated(costs=3.0), "`costs` must be a function of the arguments, but got 3.0"),
        (lambda: autotune(CONFIGS, ["n"])(grid), "grid is not a function of `triton.jit`"),
        (lambda: autotune(CONFIGS, "n")(scale_kernel.fn), r"got the text 'n'. Write \['n'\]"),
        (lambda: autotune(CONFIGS[0], ["n"])(scale_kernel.fn), "must be a list, but got one config, BLOCK: 128"),
        (lambda: autotune([{"BLOCK": 64}], ["n"])(scale_kernel.fn), r"`triton.Config`, but one is {'BLOCK': 64}"),  # type: ignore[list-item]
        (
            lambda: decorated(buckets={"factor": "power_of_two"}),
            r"names factor, but its `key` is only \[n\]. Add the name",
        ),
        (lambda: space(BLOCK=()), "the 0 choices of `BLOCK` make 0"),
        (lambda: space(BLOCK=64), r"`BLOCK` must be a sequence of choices, but got 64. Write BLOCK=\(64,\)"),  # type: ignore[arg-type]
        (lambda: space(MODE="fast"), "`MODE` must be a sequence of choices, but got 'fast'"),
        (lambda: space(A=range(100), B=range(100)), "make 10000"),
    ],
)
def test_a_wrong_decoration_is_refused(decorate: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        decorate()


def test_a_wrong_call_is_refused(gpu: FakeGpu) -> None:
    with pytest.raises(UsageError, match=r"The call of .*scale_kernel gives BLOCK, num_warps, which its configs"):
        decorated()[grid](torch.ones(8), 8, 2.0, BLOCK=128, num_warps=2)
    with pytest.raises(UsageError, match=r"`n` of .*scale_kernel is a int, which cannot be restored"):
        decorated(restore_value=["n"])[grid](torch.ones(800), 800, 2.0)


def test_a_call_is_explained_without_a_launch(gpu: FakeGpu) -> None:
    kernel, x = decorated(), torch.ones(1000)
    with pytest.raises(UsageError, match=r"Add `grid=\(...\)`"):
        kernel.explain(x, 1000, 2.0)
    assert kernel.explain(x, 1000, 2.0, grid=grid).launched.kwargs == {"BLOCK": 256}
    assert kernel.kernel.table.calls == 0
    assert str(kernel.explain(x, 1000, 2.0)).startswith("n=1000 (fp32 float): exact: scale_kernel BLOCK=256")


def test_a_space_is_every_combination() -> None:
    made = blocktune.space(BLOCK=(64, 128), num_warps=(4, 8))
    assert [(config.kwargs, config.num_warps, config.num_stages) for config in made] == [
        ({"BLOCK": block}, num_warps, 3) for block in (64, 128) for num_warps in (4, 8)
    ]

"""The bench of libraries' kernels on a fake GPU: what it finds, how it goes on, and what its processes say."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from blocktune.tuner.drop_in import tune_call
from blocktune.tuner.offline.specialization import function_named
from tests.support.fakes.fake_triton import FakeGpu, Launch
from tests.support.libraries import document as library_document
from tests.support.libraries import faults as library_faults
from tests.support.libraries import measures as library_measures
from tests.support.libraries import steps as library_steps
from tests.support.libraries.autotuned_kernels import CONFIGS, scale_kernel, sum_kernel
from tests.support.libraries.chosen_constants import tuned_in
from tests.support.triton_modes import compiled_here
from tests.tuner.drop_in.conftest import H200
from tools import program
from tools.libraries import bench as library_bench
from tools.libraries import check as library_check
from tools.libraries import starts as library_starts
from tools.pages.recorded import library_tables

pytestmark = compiled_here


def step(device: str) -> list[torch.Tensor]:
    """Launch two kernels, one of them twice."""
    x = torch.ones(1000)
    for _ in range(2):
        scale_kernel[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, 1000, 2.0)
    sum_kernel[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](torch.zeros(1), x, 1000)
    return [x]


def failing(device: str) -> list[torch.Tensor]:
    """Launch a kernel, and fail."""
    step(device)
    raise ValueError("no such shape")


def forget_choices_of_tests() -> None:
    """Let the kernels be as in a process that has launched none."""
    for kernel in (scale_kernel, sum_kernel):
        kernel.cache.clear()


@pytest.fixture
def bench(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The bench on a fake GPU, of a step of ours; Triton's own tuner takes the largest block for the fastest."""
    for module in (library_bench, library_document):
        monkeypatch.setattr(module, "current_device", lambda: H200)
    monkeypatch.setattr(library_document, "version", lambda name: "1.0")
    monkeypatch.setattr(library_measures, "EXPAND", 4)
    monkeypatch.setattr(library_steps, "STEPS", {"failing": failing, "ours": step})

    def bench_of_stock(call: Any, quantiles: Any) -> list[float]:
        call()
        return [1.0 / gpu.launches[-1].arguments["BLOCK"]] * len(quantiles)

    forget_choices_of_tests()
    for kernel in (scale_kernel, sum_kernel):
        monkeypatch.setitem(kernel.__dict__, "do_bench", bench_of_stock)
    return gpu


def test_winners_are_compared_with_every_config_and_with_stock(bench: FakeGpu, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    library_bench.Winners(path, 100.0).run(["ours"])
    document = json.loads(path.read_text())
    assert [row["kernel"].rpartition(":")[2] for row in document["kernels"]] == ["scale_kernel", "sum_kernel"]
    for row in document["kernels"]:
        assert (row["winner"]["time_us"], row["winner"]["over_best"], row["same_of_repeats"]) == (110.0, 0.0, 10)
        assert row["stock"]["time_us"] == 366.0
        assert row["stock"]["over_best"] == pytest.approx(366 / 110 - 1)
        assert row["expanded"]["time_us"] == 105.0  # one warp is in no list
        assert row["expanded"]["gain"] == pytest.approx(366 / 105)
    assert "Of 2 kernels the winner is 0.00% slower than the best config" in library_tables.block(path)
    timed = len(bench.timed)
    library_bench.Winners(path, 100.0).run(["ours"])  # what is in the file is not measured again
    assert len(bench.timed) == timed


def test_what_is_missing_of_a_row_is_measured_by_the_next_process(
    bench: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process ends within the search around a list; outputs are compared once all is known."""
    path = tmp_path / "bench.json"

    class KilledError(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise KilledError

    whole = library_measures.PARTS["expanded"]
    monkeypatch.setitem(library_measures.PARTS, "expanded", killed)
    with pytest.raises(KilledError):
        library_bench.Winners(path, 100.0).run(["ours"])
    (row,) = library_document.read(path)["kernels"]
    assert (row["winner"]["time_us"], row["same_of_repeats"], row["attempts"]) == (110.0, 10, 1)
    monkeypatch.setitem(library_measures.PARTS, "expanded", whole)
    library_bench.Winners(path, 100.0).run(["ours"])
    document = library_document.read(path)
    assert [row["expanded"]["time_us"] for row in document["kernels"]] == [105.0, 105.0]
    (step_row,) = document["steps"]
    assert step_row["difference"] == {"winner": 0.0, "expanded": 0.0}


@pytest.mark.exhaustive
def test_what_is_measured_again_keeps_the_choice_of_tritons_tuner_and_the_search(
    bench: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bench.json"
    library_bench.Winners(path, 100.0).run(["ours"])
    before = library_document.read(path)
    library_document.measure_again(path, ["failing"])
    assert library_document.read(path) == before
    library_document.measure_again(path, ["ours"])
    assert [row["again"] for row in library_document.read(path)["kernels"]] == [True, True]
    forget_choices_of_tests()
    monkeypatch.setattr(library_measures, "stock_choice", None)
    monkeypatch.setitem(library_measures.PARTS, "expanded", None)
    monkeypatch.setenv("BLOCKTUNE_COMMIT", "b" * 40)
    library_bench.Winners(path, 100.0).run(["ours"])
    document = library_document.read(path)
    for row, earlier in zip(document["kernels"], before["kernels"], strict=True):
        assert (row["commit"], "again" in row) == ("b" * 40, False)
        for name in ("winner", "stock", "expanded", "same_of_repeats", "stock_bench_seconds"):
            assert row[name] == earlier[name]
    assert document["steps"][0]["difference"] == {"winner": 0.0, "expanded": 0.0}


@pytest.mark.exhaustive
def test_a_pass_may_be_made_for_some_of_its_kernels(
    bench: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others run with the first config of their lists, and are measured by a later pass."""
    monkeypatch.setattr(library_steps, "STEPS", {"sums": step, "ours": step})
    monkeypatch.setattr(library_steps, "ONLY", {"sums": "*:sum_*"})
    library_bench.Winners(tmp_path / "bench.json", 100.0).run(["sums", "ours"])
    rows = json.loads((tmp_path / "bench.json").read_text())["kernels"]
    assert [(row["step"], row["kernel"].rpartition(":")[2]) for row in rows] == [
        ("sums", "sum_kernel"),
        ("ours", "scale_kernel"),
    ]
    assert [row["winner"]["time_us"] for row in rows] == [110.0, 110.0]


def test_what_passes_launch_is_compiled_ahead(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes launch the same kernels, and one is made for one of them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(library_steps, "ONLY", {"first": "*:sum_*"})
    monkeypatch.setattr(library_steps, "STEPS", {"first": step, "second": step})
    forget_choices_of_tests()
    for name in ("scale_kernel", "sum_kernel"):
        function_named(f"tests.support.libraries.autotuned_kernels:{name}").device_caches.clear()
    ahead = library_check.Ahead(2)
    ahead.add("first")
    assert len(ahead._compiled) == len(CONFIGS)
    ahead.add("second")
    assert ahead.finish() == 2 * len(CONFIGS) - 1  # one was compiled by the first pass's launch
    assert len(list(tmp_path.rglob("*.cubin"))) == 2 * len(CONFIGS)
    assert not gpu.timed


def test_a_search_that_never_ends_is_left_out(bench: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(library_measures.PARTS, "expanded", killed)
    for _ in range(2 * library_bench.ATTEMPTS):
        with pytest.raises(KeyboardInterrupt):
            library_bench.Winners(tmp_path / "bench.json", 100.0).run(["ours"])
    library_bench.Winners(tmp_path / "bench.json", 100.0).run(["ours"])
    document = library_document.read(tmp_path / "bench.json")
    assert [row["attempts"] for row in document["kernels"]] == [library_bench.ATTEMPTS] * 2
    assert document["steps"][0]["error"] == ""
    assert library_tables.block(tmp_path / "bench.json").count("| - |") == 2


def test_results_under_other_configs_are_compared_with_those_under_tritons(bench: FakeGpu, tmp_path: Path) -> None:
    def smaller_with_one_warp(launch: Launch) -> None:
        if launch.name == "scale_kernel":
            launch.arguments["x"].mul_(1.99995 if launch.num_warps == 1 else 2)

    bench.effect = smaller_with_one_warp
    library_bench.Winners(tmp_path / "bench.json", 100.0).run(["ours"])
    (row,) = json.loads((tmp_path / "bench.json").read_text())["steps"]
    assert (row["step"], row["error"]) == ("ours", "")
    assert row["difference"] == {"winner": 0.0, "expanded": pytest.approx(5e-5, rel=0.01)}


def test_a_pass_that_fails_is_noted_and_the_next_one_follows(bench: FakeGpu, tmp_path: Path) -> None:
    library_bench.Winners(tmp_path / "bench.json", 100.0).run(["failing", "ours"])
    document = json.loads((tmp_path / "bench.json").read_text())
    assert [(row["step"], row["error"]) for row in document["steps"]] == [
        ("failing", "ValueError: no such shape"),
        ("ours", ""),
    ]
    assert {row["step"] for row in document["kernels"]} == {"failing"}  # whose kernels were measured before it failed


def test_a_process_that_dies_costs_the_pass_that_gets_no_further(
    bench: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process dies after a kernel, the second one at once, the third one ends well."""
    path, begun = tmp_path / "bench.json", list[list[str]]()

    def apart(path: Path, steps: Any, end: float) -> int:
        begun.append(list(steps))
        document = library_document.read(path)
        if len(begun) == 1:
            library_document.write(path, document | {"kernels": [{"kernel": "a", "step": "failing"}]})
        if len(begun) == 3:
            library_document.note(document, path, {"step": "ours", "error": "", "difference": {}, "seconds": 1.0})
        return 0 if len(begun) == 3 else -11

    monkeypatch.setattr(library_bench, "measured_apart", apart)
    library_bench.winners(path, ["failing", "ours"], 100.0)
    assert begun == [["failing", "ours"], ["failing", "ours"], ["ours"]]
    assert [(row["step"], row["error"]) for row in library_document.read(path)["steps"]] == [
        ("failing", "its process ended with -11"),
        ("ours", ""),
    ]
    library_bench.winners(path, ["failing", "ours"], 100.0)  # a later command tries again what failed
    assert begun[3:] == [["failing"]]


def test_a_bench_ends_when_its_seconds_are_over(
    bench: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library_bench.Winners(tmp_path / "bench.json", -1.0).run(["ours"])
    assert "run this again for the rest" in capsys.readouterr().out
    assert not bench.timed


def test_constants_that_a_library_chooses_are_chosen_by_the_tuner(gpu: FakeGpu) -> None:
    library: Any = ModuleType("library")
    library.kernel = jitted = scale_kernel.fn
    x = torch.ones(1000)
    with tuned_in(library, "kernel", CONFIGS, ["n"], restore_value=["x"]):
        library.kernel[(1,)](x, n=1000, factor=2.0, BLOCK=64, num_warps=1)
    assert (gpu.launches[-1].arguments["BLOCK"], gpu.launches[-1].num_warps) == (256, 2)
    assert library.kernel is jitted


@pytest.mark.exhaustive
def test_configs_that_fault_are_counted_and_the_result_is_compared(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake worker dies in blocks of 512, and waits for nothing."""
    tools = replace(tune_call.machine(), command=program("workers.fake_measure_worker"))
    monkeypatch.setattr(tune_call, "machine", lambda: tools)
    monkeypatch.setattr(library_faults, "ANSWER_SECONDS", 12.0)
    monkeypatch.setattr(FakeGpu, "get_benchmarker", lambda _: lambda call, quantiles: call() or [1.0], raising=False)
    gpu.effect = lambda launch: launch.arguments["x"].fill_(1.0)
    row = library_faults.faulty_configs("cpu")
    assert (row["configs"], row["equal"], row["winner"]) == (
        4,
        True,
        "harmful_kernel BLOCK=1024 num_stages=3 num_warps=4",
    )
    assert [label.partition(" ")[2].partition(" ")[0] for label in row["lost"]] == ["BLOCK=512"]


def test_processes_that_disagree_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(
        [
            {"step_seconds": 3.0, "tuned": 2, "choices": {"a": "BLOCK=1", "b": "BLOCK=1"}},
            {"step_seconds": 4.0, "tuned": 0, "choices": {"a": "BLOCK=1", "b": "BLOCK=2"}},
            {"step_began": 2.0},
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
        "errors": [],
    }


def start_program(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let a start of a library run this program."""
    command = [sys.executable, "-c", code]
    monkeypatch.setattr(
        library_starts,
        "started",
        lambda *_: subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True),
    )


@pytest.mark.exhaustive
def test_a_start_that_takes_too_long_says_how_long_its_step_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """The imports before it do not count."""
    code = "import json, time; print(json.dumps({'step_began': time.monotonic() - 5.0}), flush=True); time.sleep(60)"
    start_program(monkeypatch, code)
    row = library_starts.timed_start("fla", "stock", "", 10.0)
    assert row["step_seconds"] is None
    assert 5.0 <= row["longest_seconds"] <= row["process_seconds"] + 5.0
    assert row["error"] == ""


def test_a_start_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "raise SystemExit('no library')"
    start_program(monkeypatch, code)
    row = library_starts.timed_start("fla", "stock", "", 60.0)
    assert row["step_seconds"] is None
    assert "no library" in row["error"]
    assert "no library" in library_starts.agreement("fla", 1, 60.0)["errors"][0]

"""What a GPU contributes: all parts within ten minutes, what was left out by name, and no name of the machine."""

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.exchange.importing import records_in
from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import ImportRejectedError, UsageError
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.contribute import contribution
from blocktune.tuner.contribute.anonymous import machine_hash, without_names
from blocktune.tuner.contribute.conformance import check_cases
from blocktune.tuner.contribute.fixed_shapes import fixed_shapes
from blocktune.tuner.measure.runner import GpuRunner
from tests.support.fakes.contributing_gpu import ENVIRONMENT, ContributingGpu, Wall
from tests.support.fakes.fake_kernels import SHAPE
from tests.tuner.measure.test_runner import DEADLINES, WORKER, config

pytestmark = pytest.mark.triton_free

DEVICE = replace(device_named("rtx2070"), uuid="GPU-1234")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A complete contribution."""
    return contribute(ContributingGpu(DEVICE, seconds=0.1))


def contribute(gpu: ContributingGpu, saved: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    return contribution.contribute(
        gpu.device,
        ENVIRONMENT,
        gpu.instruments(**changes),
        save=(saved if saved is not None else []).append,
        on_progress=lambda said: None,
    )


@pytest.mark.parametrize("name", ["rtx2070", "h200"])
def test_there_is_a_dozen_of_shapes_of_each_direction_in_a_type_that_the_gpu_has(name: str) -> None:
    shapes = fixed_shapes(device_named(name).limits)
    decodings = [shape for shape in shapes if shape.seqlen_q == 1]
    backwards = [shape for shape in shapes if shape.direction is Direction.BACKWARD]
    assert (len(set(shapes)), len(decodings), len(backwards)) == (36, 12, 12)
    assert {shape.dtype for shape in shapes} == {"float16" if name == "rtx2070" else "bfloat16"}


def test_all_parts_are_there_and_an_import_reads_them() -> None:
    saved: list[dict[str, Any]] = []
    gpu = ContributingGpu(DEVICE, seconds=0.1)
    document = contribute(gpu, saved)
    assert len(document["bench"]["rows"]) == 36
    assert {row["outcome"] for row in document["conformance"]} == {"ok"}
    assert document["noise"]["configs"] >= 1
    assert document["left_out"] == {}
    assert {row["blocks_per_sm"] for row in document["compiled"]} == {2}
    assert len(saved) == 3 + 36
    bests, trials = records_in(json.loads(json.dumps(document)))
    assert {best.origin for best in bests} == {Origin.MEASURED}
    assert {len(best.votes) for best in bests} == {1}
    assert {best.shape for best in bests} == set(fixed_shapes(DEVICE.limits))
    assert {trial.environment for trial in trials} == {ENVIRONMENT}


@pytest.mark.parametrize(("default_us", "default_wins"), [(91.0, True), (100.0, False)])
def test_another_config_wins_only_if_it_is_faster_by_more_than_the_rounds_vary(
    default_us: float, default_wins: bool
) -> None:
    bests, _ = records_in(contribute(ContributingGpu(DEVICE, seconds=0.1, default_us=default_us)))
    differing = [best for best in bests if best.config != best.default]
    assert bool(differing) is not default_wins
    assert all(best.speedup_over_default == pytest.approx(100 / 90) for best in differing)


def test_slow_gpus_stop_within_ten_minutes_and_name_what_they_left_out() -> None:
    gpu = ContributingGpu(DEVICE, seconds=17.0)
    document = contribute(gpu)
    assert gpu.wall.at <= 600
    shapes = {row["label"] for row in document["bench"]["rows"]}
    left_out = document["left_out"]
    assert 0 < len(shapes) < 36
    assert shapes | set(left_out) - {"conformance"} == {shape.label for shape in fixed_shapes(DEVICE.limits)}
    assert "for lack of time" in left_out["conformance"]
    assert {row["shape"]["direction"] for row in document["bench"]["rows"]} == {"forward", "backward"}


def test_what_did_not_compile_in_time_is_stopped_and_neither_checked_nor_timed() -> None:
    gpu = ContributingGpu(DEVICE, seconds=0.1)
    first = fixed_shapes(DEVICE.limits)[0]
    gpu.unfinished = {first}
    short = replace(gpu.instruments().deadlines, compiled=0.01)
    document = contribute(gpu, deadlines=short)
    assert gpu.aborted
    assert all(not future.done() for future in gpu.aborted)
    assert document["left_out"] == {first.label: contribution.NOT_COMPILED, "noise": contribution.NOT_COMPILED}


@pytest.mark.exhaustive
def test_what_is_checked_is_compiled_with_the_log_sum_exp_too() -> None:
    """Else the check, which launches so, would compile while its time runs."""
    gpu = ContributingGpu(DEVICE, seconds=0.1)
    document = contribute(gpu)
    assert [shape.label for shape in gpu.with_lse] == [row["shape"] for row in document["conformance"]]


@pytest.mark.exhaustive
def test_a_shape_that_does_not_fit_is_left_out_with_the_reason() -> None:
    gpu = ContributingGpu(DEVICE, seconds=0.1)
    large = fixed_shapes(DEVICE.limits)[-1]

    def compare(shape: AttentionShape) -> Any:
        if shape == large:
            raise UsageError("The tensors must fit the memory.")
        return gpu.compare(shape)

    document = contribute(gpu, compare=compare)
    assert document["left_out"] == {large.label: "The tensors must fit the memory."}
    assert len(document["bench"]["rows"]) == 35


def test_no_text_names_the_machine_or_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "box7.lab.example")
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    gpu = ContributingGpu(DEVICE, seconds=0.1, wrong="flash_fwd")
    gpu.error = f"alice@box7.lab.example: no file {Path.home()}/x, box7 is full, malice stays"
    document = contribute(gpu)
    text = json.dumps(document)
    assert document["machine"] is not None
    for name in ("box7", "alice@", str(Path.home()), "GPU-1234"):
        assert name not in text
    assert "malice stays" in text
    assert without_names("/data/x") == "/data/x"


@pytest.mark.parametrize("error", [KeyError("getpwuid(): uid not found: 54321"), OSError("No username set")])
def test_a_user_without_a_name_or_folder_leaves_nothing_else_out(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> str:
        raise error

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(socket, "gethostname", lambda: "box7")
    monkeypatch.setattr("getpass.getuser", fail)
    monkeypatch.setattr(Path, "home", homeless)
    assert without_names("CUDA error on box7 in /data/x") == "CUDA error on ... in /data/x"
    monkeypatch.setattr(socket, "gethostname", lambda: "")
    assert without_names("CUDA error") == "CUDA error"
    assert without_names("") == ""


def test_a_machine_is_one_whatever_gpu_of_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = ("GPU-b", "GPU-a")
    monkeypatch.setattr("blocktune.tuner.contribute.anonymous.gpu_uuids", lambda: uuids)
    one, other = (machine_hash(replace(DEVICE, uuid=uuid)) for uuid in uuids)
    assert one == other
    monkeypatch.setattr("blocktune.tuner.contribute.anonymous.gpu_uuids", lambda: ())
    assert machine_hash(replace(DEVICE, uuid="GPU-a")) == one
    assert machine_hash(replace(DEVICE, uuid=None)) is None


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"seconds": 1.0}, "the hash of the rest"),
        ({"surprise": 1}, "absent"),
        ({"machine": "my-box"}, "hash of the rest"),
        ({"schema": 2}, "an integer from 1 to 1"),
    ],
)
def test_a_contribution_that_was_changed_is_refused(
    document: dict[str, Any], change: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ImportRejectedError, match=rule):
        records_in(document | change)


def test_a_contribution_in_a_contribution_is_refused(document: dict[str, Any]) -> None:
    outer = contribution.contribution_document(document, document)
    with pytest.raises(ImportRejectedError, match="must be"):
        records_in(outer)


@pytest.mark.exhaustive
def test_a_kernel_that_takes_its_process_along_costs_one_case() -> None:
    """The real worker, on the CPU."""
    runner = GpuRunner(SHAPE, command=WORKER, deadlines=DEADLINES)
    cases = [(SHAPE, config(name)) for name in ("honest", "segfault", "nan", "honest")]
    try:
        rows = list(check_cases(cases, runner, until=1000.0, now=Wall()))
    finally:
        runner.close()
    assert [row["outcome"] for row in rows] == ["ok", "run_error", "wrong_result", "ok"]
    assert "SIGSEGV" in rows[1]["error"]
    assert "not finite" in rows[2]["error"]


@pytest.mark.exhaustive
def test_a_device_without_a_uuid_has_no_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    unnamed: DeviceSpec = replace(DEVICE, uuid=None)
    monkeypatch.setattr("blocktune.tuner.contribute.anonymous.gpu_uuids", lambda: ())
    bests, _ = records_in(contribute(ContributingGpu(unnamed, seconds=0.1)))
    assert {best.votes for best in bests} == {()}

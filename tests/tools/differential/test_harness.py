"""Faults that were planted are found and named, and the run goes on."""

import json
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from blocktune.kernels.values.errors import UsageError
from tools.differential.__main__ import fuzz, main
from tools.differential.cases.case import Case, CompileClass, class_to_json
from tools.differential.cases.enums import Entry
from tools.differential.cases.strategies import drawn_cases
from tools.differential.runs.parent import Ended, Pool, Setup
from tools.differential.runs.report import Report
from tools.differential.truth import planted
from tools.pages.checks.differential_tables import read_differential

KIND = CompileClass(entry=Entry.SDPA, dtype="float16", head_dim=16, head_dim_v=16)
PLANTED = Setup(device="cpu", subject="tools.differential.truth.planted", timeout_s=60.0)


def calls(*scales: float | None) -> list[dict[str, Any]]:
    return [Case(kind=KIND, seed=index, seqlen_q=5, seqlen_k=9, scale=scale).to_json()
            for index, scale in enumerate(scales)]  # fmt: skip


def outcomes(setup: Setup, jobs: list[dict[str, Any]], workers: int = 1) -> tuple[list[dict[str, Any]], list[str]]:
    """What becomes of every case, and the problems of the workers."""
    records: list[dict[str, Any]] = []
    pool = Pool(setup, workers, monotonic() + 280, records.append)
    pool.run(iter(jobs))
    return records, pool.problems


@pytest.mark.exhaustive
@pytest.mark.slow
def test_planted_faults_are_named_by_their_case() -> None:
    scales = (None, planted.WRONG, planted.LOST, planted.RAISES, planted.DEAD, planted.HANGS, 0.5)
    setup = replace(PLANTED, timeout_s=15.0)
    records, problems = outcomes(setup, [{"case": case} for case in calls(*scales)])
    found = {record["case"].get("scale"): record for record in records}
    assert {scale: found[scale]["verdict"] for scale in scales} == {
        None: "right",
        planted.WRONG: "wrong",
        planted.LOST: "wrong",
        planted.RAISES: "raised",
        planted.DEAD: "dead",
        planted.HANGS: "hung",
        0.5: "right",
    }
    assert problems == []
    assert found[planted.WRONG]["comparisons"][0]["ratio"] > 1
    assert found[planted.LOST]["comparisons"][0]["lost"] == 1
    assert "planted" in found[planted.RAISES]["message"]
    assert "ended with 9" in found[planted.DEAD]["message"]
    assert Case.from_json(found[planted.DEAD]["case"]).scale == planted.DEAD


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: A GPU is required here.")


@pytest.mark.exhaustive
def test_the_rest_of_a_class_runs_after_a_death() -> None:
    drawn = [case.scale for _, case in drawn_cases(KIND, 11, 30)]
    scale = next(scale for scale in drawn[:-1] if scale is not None and drawn.count(scale) <= 2)
    setup = replace(PLANTED, environment={"PLANTED_DEAD": str(scale)})
    records, problems = outcomes(setup, [{"kind": class_to_json(KIND), "seed": 11, "count": 30}])
    verdicts = [record["verdict"] for record in records]
    assert len(records) == 30
    assert problems == []
    assert [record["case"].get("scale") for record in records] == drawn
    assert [verdict == "dead" for verdict in verdicts] == [each == scale for each in drawn]


@pytest.mark.exhaustive
class DyingWorker:
    """Answers what it is given, and has ended then."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self._answers = list(answers)

    def send(self, document: dict[str, Any]) -> None:
        assert document["number"] == 7

    def answer(self, timeout_s: float) -> dict[str, Any]:
        if not self._answers:
            raise Ended("dead", "the process ended with -11: ")
        return self._answers.pop(0)


def test_a_death_within_pytorchs_call_is_not_ours() -> None:
    begun = [{"begin": index, "case": {"kind": {}}} for index in range(2)]
    raised = {"raised": 0, "message": "UsageError: no"}
    for answers, verdict in (
        ((begun[0], raised), "pytorch_dead"),
        ((begun[0], raised, {"end": 0, "verdict": "refused"}, begun[1]), "dead"),
    ):
        records: list[dict[str, Any]] = []
        worker: Any = DyingWorker(*answers)
        left = Pool(PLANTED, 1, monotonic() + 5, records.append)._run(worker, {"kind": {}, "number": 7})
        assert records[-1]["verdict"] == verdict
        assert left == {"kind": {}, "number": 7, "first": len(records)}
        assert ("UsageError: no" in records[-1]["message"]) == (verdict == "pytorch_dead")


@pytest.mark.exhaustive
def test_workers_that_cannot_start_are_named_and_end_the_run() -> None:
    records, problems = outcomes(Setup(device="cpu", subject="no_such_module"), [{"case": calls(None)[0]}])
    assert records == []
    assert len(problems) == 3
    assert "no_such_module" in problems[0]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_report_counts_what_ran_and_may_be_added_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cpu.differential.json"
    setup = Setup(device="cpu", subject="tools.differential.truth.planted")
    for seed in (1, 2):
        fuzz(setup, seed=seed, seconds=250, cases=6, per_class=3, entry="attention", jobs=1, out=out)
    document = read_differential(out)
    assert document["cases"] == 12
    assert [run["seed"] for run in document["runs"]] == [1, 2]
    assert sum(row["cases"] for row in document["by"]["dtype"].values()) == 12
    assert sum(document["verdicts"].values()) == 12
    assert "12 cases" in capsys.readouterr().out
    with pytest.raises(UsageError, match="of one device and software"):
        Report.begun(out, "NVIDIA H100")


def test_a_failure_is_kept_with_its_case_and_a_difference_with_an_example() -> None:
    report = Report.begun(None, "cpu")
    case = calls(None)[0]
    report.add({"case": case, "verdict": "wrong", "ratio": 7.0, "served": ["flash_fwd"], "comparisons": []})
    report.add({"case": case, "verdict": "right", "ratio": 0.5, "served": ["flash_fwd"]})
    for _ in range(2):
        report.add({"case": case, "verdict": "other_error", "message": "rank: ours UsageError", "served": []})
    document = report.document({"seed": 1}, ["a worker"])
    assert json.loads(json.dumps(document)) == document
    assert (report.cases, report.failed, len(document["failures"])) == (4, 1, 1)
    assert document["failures"][0]["case"] == case
    assert [row["count"] for row in document["differences"].values()] == [2]
    assert document["by"]["kernel"] == {"flash_fwd": {"cases": 2, "failed": 1}}
    assert document["ratios"]["float16"]["largest"] == 0.5
    assert document["problems"] == ["a worker"]


INTERPRETED = [
    Case(kind=CompileClass(entry=Entry.SDPA, dtype="float16", head_dim=16, head_dim_v=24, causal=True,
                           group=2), seed=1, batch=2, seqlen_q=40, seqlen_k=33),
    Case(kind=CompileClass(entry=Entry.SDPA, dtype="float32", head_dim=20, head_dim_v=20, mask="boolean",
                           gradients=True, heads_kv=2), seed=2, seqlen_q=17, seqlen_k=30, hidden="rows"),
    Case(kind=CompileClass(entry=Entry.FLASH, dtype="float16", head_dim=16, head_dim_v=16, window=True, causal=True),
         seed=3, batch=2, seqlen_q=20, seqlen_k=50, window=(7, 0)),
]  # fmt: skip


@pytest.mark.slow
def test_the_kernels_pass_in_tritons_interpreter() -> None:
    setup = Setup(device="cpu", pretend="rtx2070", timeout_s=250.0, environment={"TRITON_INTERPRET": "1"})
    records, problems = outcomes(setup, [{"case": case.to_json()} for case in INTERPRETED])
    assert problems == []
    assert [record["verdict"] for record in records] == ["right"] * 3, records
    served = [set(record["served"]) for record in records]
    assert all(names and "pytorch" not in names for names in served), served
    assert any("bwd" in name for name in served[1])

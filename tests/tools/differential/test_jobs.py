"""Cases have numbers, failures have kinds, and smaller cases are found."""

from itertools import islice
from typing import Any

import pytest

from tools.differential.cases.case import Case, class_from_json
from tools.differential.cases.strategies import drawn_cases
from tools.differential.runs.jobs import case_of, planned_jobs
from tools.differential.runs.kinds import kind_of, unusual
from tools.differential.runs.report import KEPT_OF_A_KIND, Report
from tools.differential.runs.shrinking import Shrinking

CASE: dict[str, Any] = {
    "kind": {"entry": "flash_attn_func", "dtype": "float16", "head_dim": 40, "head_dim_v": 40, "window": True,
             "alibi": True, "heads_kv": 2},
    "seed": 7, "batch": 3, "seqlen_q": 33, "seqlen_k": 40, "window": [2**31 - 1, 0], "softcap": 1.0, "scale": 0.0,
}  # fmt: skip
WRONG: dict[str, Any] = {"case": CASE, "verdict": "wrong", "comparisons": [{"name": "k"}, {"name": "k"}]}


@pytest.mark.parametrize("small", [False, True])
def test_a_number_names_the_case_that_a_job_runs(small: bool) -> None:
    for job in islice(planned_jobs(5, small=small), 2, 4):
        drawn = [case for _, case in drawn_cases(class_from_json(job["kind"]), job["seed"], 3)]
        assert [case_of(5, job["number"] + index, small=small) for index in range(3)] == drawn


def test_numbers_do_not_depend_on_what_else_runs() -> None:
    every = {job["number"]: job for job in islice(planned_jobs(5), 40)}
    some = list(islice(planned_jobs(5, "flash_attn_func", per_class=2), 3))
    assert all(every[job["number"]]["kind"] == job["kind"] for job in some)
    assert [job["count"] for job in some] == [2, 2, 2]


def test_cases_for_a_cpu_are_small() -> None:
    for job in islice(planned_jobs(5, small=True), 40):
        kind = class_from_json(job["kind"])
        assert kind.dtype != "bfloat16"
        assert max(kind.head_dim, kind.head_dim_v) <= 64
        assert kind.regime in ("few", "tiny")


def test_a_kind_of_failure_is_what_is_unusual_about_the_case() -> None:
    assert kind_of(WRONG) == "wrong flash_attn_func, window at a limit, scale <= 0, k"
    raised = {"case": CASE, "verdict": "raised", "message": "UsageError: page 17 of 3\nmore"}
    assert kind_of(raised) == "raised: UsageError: page N of N"
    assert unusual(Case.from_json(CASE | {"window": [3, 0], "scale": 0.1}).to_json()) == []


def test_a_report_keeps_a_few_failures_of_every_kind() -> None:
    report = Report.begun(None, "cpu")
    added = [report.add(WRONG | {"seed": 1, "number": number}) for number in range(5)]
    other = {"case": CASE, "verdict": "hung", "message": "no answer", "seed": 1, "number": 9}
    assert [*added, report.add(other)] == [True, False, False, False, False, True]
    document = report.document({}, [])
    assert [row["count"] for row in document["kinds"].values()] == [5, 1]
    assert [row["number"] for row in document["kinds"].values()] == [0, 9]
    assert len(document["failures"]) == KEPT_OF_A_KIND + 1


def test_the_smallest_case_that_fails_is_found() -> None:
    """A case fails here if its window is at the limit, and it has 10 keys."""
    shrinking = Shrinking(WRONG)
    for job in shrinking.jobs():
        case = Case.from_json(job["case"])
        fails = case.window[0] == 2**31 - 1 and case.kind.window and case.seqlen_k >= 10
        shrinking.add(WRONG | {"case": job["case"], "verdict": "wrong" if fails else "right"})
    assert shrinking.smallest["case"] == {
        "kind": {"entry": "flash_attn_func", "dtype": "float16", "head_dim": 16, "head_dim_v": 16, "window": True},
        "seed": 7,
        "seqlen_k": 10,
        "window": [2**31 - 1, 0],
    }

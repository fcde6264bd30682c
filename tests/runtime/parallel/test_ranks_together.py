"""Ranks on gloo share attention: results and gradients are those of one device, wrong calls are refused by all ranks,
and a rank that does not come ends all others."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.cases import Case, cases, many_cases
from tests.support.suite import warm_python
from tools import ROOT, program

pytestmark = [pytest.mark.triton_free, pytest.mark.xdist_group("ranks")]  # one worker plays, not each of them

TOLERANCE = {"float64": 1e-10, "float32": 2e-6, "bfloat16": 1.2e-2}
SINK_TOLERANCE = {"float64": 2e-6, "float32": 2e-6, "bfloat16": 1.2e-2}
"""Their gradient is summed in float32."""

Told = dict[str, dict[str, Any]]


def played(folder: Path, which: str, timeout_s: int) -> Told:
    command = [*program("ranks.shared_attention"), str(folder), which]
    result = warm_python.run(command, timeout=timeout_s)
    assert result.returncode == 0, result.stderr
    found: Told = json.loads(result.stdout)
    assert not any(found["compare"]["statuses"]), result.stderr
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What every rank of every play found; all of them are played in one go."""
    return played(tmp_path_factory.mktemp("ranks"), "ordinary", 280)


def assert_right(case: Case, found: list[dict[str, Any]]) -> None:
    mine = [rank[str(case)] for rank in found[: case.ranks]]
    assert len(mine) == case.ranks
    for errors in mine:
        assert errors.keys() >= {"out", "lse", "dq", "dk", "dv"}
        assert ("dsinks" in errors) == case.sinks
        for name, error in errors.items():
            assert error <= (SINK_TOLERANCE if name == "dsinks" else TOLERANCE)[case.dtype], (name, error)


@pytest.mark.parametrize("case", [case for ranks in (2, 3, 4) for case in cases(ranks)], ids=str)
def test_results_and_gradients_are_those_of_one_device(told: Told, case: Case) -> None:
    assert_right(case, told["compare"]["told"])


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [5, 6, 7, 8])
def test_many_more_calls_of_up_to_eight_ranks(ranks: int, tmp_path: Path) -> None:
    found = played(tmp_path, str(ranks), 550)["compare"]["told"]
    all_cases = list(many_cases(ranks))
    assert len(all_cases) > 150
    for case in all_cases:
        assert_right(case, found)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("length", "but got ranks 0, 1: seqlen=48; rank 2: seqlen=51. Where parts have different lengths"),
        ("layout", "rank 2: q, k and v must have the 17 tokens of part 2 of 51 tokens, but got 16 queries"),
        ("other layout", "rank 0: layout="),
        ("heads", "rank 2: `num_heads % num_heads_kv == 0` must hold, but got 3 query heads"),
        ("dtype", "ranks 0, 1: dtype=torch.float32; rank 2: dtype=torch.float16. Pass the same"),
        ("scale", "rank 0: scale=0.5; ranks 1, 2: scale=0.35"),
        ("dimensions", "ranks 0, 1, 2: `q` must be [batch, heads, length, dim], but got (4, 16, 8)"),
        ("no tensor", "rank 0: `q` must be a tensor, but got str"),
        ("no numbers", "ranks 0, 1, 2: `cu_seqlens` must be whole numbers, but got '0,9'"),
        ("no layout", "ranks 0, 1, 2: `layout` must be a name or a SequenceLayout, but got list"),
        ("cu_seqlens", "ranks 0, 1, 2: `cu_seqlens` must begin with 0 and ascend"),
        ("end", "`cu_seqlens[-1] <= tokens` must hold, but got 49 and 48"),
        ("schedule", "ranks 0, 1, 2: `schedule` must be auto or one of ring, ulysses, all_gather, but got 'star'"),
        ("ulysses", "cannot be divided among the 3 ranks that trade heads"),
        ("gradient", "rank 0: requires_grad=[True, True, True, False]; ranks 1, 2: requires_grad=[False"),
        ("join", "rank 0: seqlen=51; ranks 1, 2: seqlen=48"),
        ("no cache", "rank 2: `k_cache` must be a tensor, but got str"),
        ("decode", "rank 0: q=[1, 5, 4, 8]; ranks 1, 2: q=[1, 4, 4, 8]"),
    ],
)
def test_a_wrong_call_is_refused_by_all_ranks(told: Told, name: str, message: str) -> None:
    answers = [rank[name] for rank in told["refuses"]["told"]]
    assert [answer["error"] for answer in answers] == ["UsageError"] * 3
    assert len({answer["text"] for answer in answers}) == 1
    assert message in answers[0]["text"]


def test_the_ranks_go_on_after_refused_calls(told: Told) -> None:
    assert [rank["works after"] for rank in told["refuses"]["told"]] == [[1, 4, 16, 8]] * 3


def test_a_known_call_is_described_once(told: Told) -> None:
    assert [rank["descriptions"] for rank in told["descriptions"]["told"]] == [[1, 0, 1, 0]] * 2


@pytest.mark.parametrize(("play", "content"), [("dead", "keys and values"), ("dead in decoding", "partial results")])
def test_a_dead_rank_ends_the_others_and_is_named(told: Told, play: str, content: str) -> None:
    *living, dead = told[play]["told"]
    assert told[play]["statuses"] == [0, 0, 7]
    assert dead is None
    assert [answer["error"] for answer in living] == ["RankError"] * 2
    # the other neighbour is named too where the message could not be begun
    named = re.compile(rf"could not exchange {content} with rank (\d, )?2:")
    assert any(named.search(answer["text"]) for answer in living)
    assert all(answer["text"].endswith("its own error says why.") for answer in living)


def test_another_size_ends_all_ranks_within_the_timeout(told: Told) -> None:
    answers = told["size"]["told"]
    assert [answer["error"] for answer in answers] == ["RankError"] * 3
    assert "rank 1 could not exchange the description of its call with rank" in answers[1]["text"]
    assert any("with rank 1:" in answer["text"] for answer in (answers[0], answers[2]))


@pytest.mark.parametrize(
    ("play", "content"), [("absent", "the description of its call"), ("absent in decoding", "partial results")]
)
def test_an_absent_rank_ends_all_others_within_the_timeout(told: Told, play: str, content: str) -> None:
    answers = [told[play]["told"][rank] for rank in (0, 2)]
    assert [answer["error"] for answer in answers] == ["RankError"] * 2
    assert any(f"{content} with rank 1" in answer["text"] for answer in answers)


def test_a_gather_that_names_no_rank_asks_which_are_silent(told: Told) -> None:
    answers = told["absent in a gather"]["told"]
    wanted = "partial results: the gather timed out. Rank 1, which does not answer, ended or called something else"
    for rank in (0, 2):
        assert answers[rank]["error"] == "RankError"
        assert f"rank {rank} could not gather their {wanted}: its own error says why." in answers[rank]["text"]


def test_a_sequence_is_split_and_joined(told: Told) -> None:
    assert [rank["same"] for rank in told["sequence"]["told"]] == [[True] * 11] * 3


def test_decoding_over_caches_of_all_ranks(told: Told) -> None:
    for rank in told["decode"]["told"]:
        assert max(rank["out"], rank["lse"]) < 2e-6


def test_meshes_are_groups(told: Told) -> None:
    for rank in told["mesh"]["told"]:
        assert rank["same"] == [True] * 4
        assert max(rank["out"], rank["lse"]) < 2e-6
        assert "must have one or two dimensions and hold this rank" in rank["refused"]["text"]
        assert "but got rank 2: scale=1.0; rank 3: scale=0.5" in rank["wrong"]["text"]


@pytest.mark.parametrize("way", ["again", "checkpoint", "compiled"])
def test_training_steps_are_equal_to_the_bit(told: Told, way: str) -> None:
    assert [rank[way] for rank in told["trains"]["told"]] == [True, True]


def test_schedules_are_measured_by_all_ranks_and_kept_by_the_first(told: Told) -> None:
    first, second = told["tunes"]["told"]
    assert list(first["times_us"]) == list(second["times_us"])
    assert sorted(first["times_us"]) == ["all_gather", "ring", "ulysses"]
    assert first["times_us"] == second["times_us"]
    winner = min(first["times_us"], key=first["times_us"].__getitem__)
    assert next(iter(first["times_us"])) == winner
    for rank in (first, second):
        assert rank["chosen"] == [winner, "ring", "ulysses", "all_gather"]
        assert rank["without backward"]
        assert rank["sent"] == 1
    assert (first["kept"], second["kept"]) == ([winner], [])


@pytest.mark.exhaustive
def test_the_bench_runs_where_there_is_no_gpu(tmp_path: Path) -> None:
    """Its rates mean nothing on a CPU, but every step of it is taken."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    bench = ["-m", "tools.ranks.bench", "--lengths", "128", "--length-alone", "128"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", *ranks, *bench, "--out", str(tmp_path / "bench.json")]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert max(row["worst_of_largest"] for row in rows if row["kind"] == "error") < TOLERANCE["bfloat16"]
    measured = [row["name"] for row in rows if row["kind"] == "together" and row["direction"] == "both" and "ms" in row]
    assert measured == ["ring", "ulysses"]  # of two ranks the gather is the ring
    assert {row["kind"] for row in rows} == {"error", "link", "alone", "together", "head start", "window", "decode"}

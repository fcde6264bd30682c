"""Shapes drawn next to every peer: the draw, who takes part, what is written of them, and processes that end."""

import json
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import kernels_for
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.measure.clock import CudaClock
from tools.bench.drawn_peers import apart, flash3_backward, measuring, peers
from tools.bench.drawn_peers.apart import MeasuringProcess
from tools.bench.drawn_peers.cells import Cell
from tools.bench.drawn_peers.draw import GROUPS, drawn_cells
from tools.bench.drawn_peers.measuring import Measuring, difference_in_words, fastest_of, summary_of
from tools.bench.drawn_peers.pages_in_float32 import attend_pages
from tools.bench.drawn_peers.problem import Problem
from tools.bench.drawn_peers.record import Record, summaries
from tools.differential.runs.served import ServedBy

FIRST, *_, LAST = GROUPS
CELL = Cell(group="forward, head_dim 64", shape=AttentionShape(batch=1, num_heads=2, seqlen_q=8, head_dim=64))


def test_a_seed_names_its_cells_and_kernels_compute_all_of_them() -> None:
    cells = drawn_cells(5, 200)
    assert cells == drawn_cells(5, 200) != drawn_cells(6, 200)
    assert [Cell.from_json(json.loads(json.dumps(cell.to_json()))) for cell in cells] == cells
    limits = device_named("h200").limits
    assert all(kernels_for(cell.shape, limits) for cell in cells)


def test_every_group_has_its_share_and_a_part_of_the_cells_too() -> None:
    cells = drawn_cells(1, 200)
    for name, (share, _) in GROUPS.items():
        assert sum(cell.group == name for cell in cells) == share
        assert abs(sum(cell.group == name for cell in cells[:100]) - share / 2) <= 1


def test_cells_are_what_their_groups_say() -> None:
    for cell in drawn_cells(2, 200):
        shape, kind = cell.shape, cell.group.partition(",")[0]
        assert cell.is_backward == (kind == "backward")
        assert (shape.seqlen_q <= 16) == (kind == "decoding")
        assert shape.features.varlen == cell.group.endswith("packed")
        assert (shape.features.window is not None) == cell.group.endswith("window")
        assert bool(shape.features.page_size) == cell.group.endswith("pages")
        assert len(cell.lengths) == (shape.batch if shape.features.varlen or shape.features.page_size else 0)
        assert max(cell.lengths, default=0) <= shape.seqlen_k


def test_who_is_not_installed_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(peers.importlib, "import_module", absent)
    assert peers.missing_reason(peers.CUDNN) is None
    for name in (peers.FA3, peers.FA4):
        assert "No module named" in str(peers.missing_reason(name))
    monkeypatch.setitem(__import__("sys").modules, "jax", None)
    assert "cannot be had" in str(flash3_backward.missing_reason())


def test_ratios_are_paired_by_round_and_the_fastest_peer_counts() -> None:
    times = {"ours": [10.0, 20.0, 40.0], "fa2": [11.0, 22.0, 44.0], "cudnn": [9.0, 19.0, 60.0], "pytorch": [1.0] * 3}
    found = summary_of(times)
    assert found["ratios"] == {"fa2": 1.1, "cudnn": 0.95}
    assert found["times_us"] == {"ours": 20.0, "fa2": 22.0, "cudnn": 19.0, "pytorch": 1.0}
    assert fastest_of(found["ratios"]) == {"fastest": "cudnn", "ratio": 0.95}
    assert fastest_of({}) == {}


def test_groups_are_summed_up() -> None:
    rows: list[dict[str, Any]] = [
        {"group": LAST},
        {"group": FIRST, "ratio": 0.96},
        {"group": FIRST, "ratio": 0.99},
        {"group": FIRST, "ratio": 1.1},
        {"group": FIRST, "error": "wrong"},
    ]
    found = summaries(rows)
    assert list(found) == [FIRST, LAST, "all"]
    counts = {"cells": 3, "errors": 1, "without_peer": 0, "slower": 2, "clearly_slower": 1}
    assert found[FIRST] == counts | {"mean": pytest.approx((0.96 * 0.99 * 1.1) ** (1 / 3), abs=1e-4), "least": 0.96}
    assert found[LAST] == {"cells": 0, "errors": 0, "without_peer": 1}
    assert found["all"]["cells"] == 3


def test_the_file_has_every_row_that_was_added(tmp_path: Path) -> None:
    path = tmp_path / "h200.drawn-peers.table.json"
    record = Record(path, seed=3, drawn=2, peers=["fa2"], missing={"fa4": "not here"})
    record.add({"group": FIRST, "ratio": 1.2})
    document = json.loads(path.read_text())
    assert document["rows"] == [{"group": FIRST, "ratio": 1.2}]
    assert document["groups"][FIRST]["mean"] == 1.2
    assert (document["seed"], document["drawn"], document["missing"]) == (3, 2, {"fa4": "not here"})
    assert "torch" in document["environment"]


def test_results_that_differ_more_than_roundings_are_wrong() -> None:
    exact = torch.randn(64, 64)
    assert difference_in_words((exact.bfloat16(),), (exact,)) is None
    assert difference_in_words((exact * 1.1,), (exact,)) == "result 0 differs by 0.100"
    assert "nan" in str(difference_in_words((exact * torch.nan,), (exact,)))


def test_pages_are_read_in_the_order_of_the_table() -> None:
    shape = AttentionShape(
        batch=2, num_heads=4, num_heads_kv=2, seqlen_q=3, seqlen_k=32, head_dim=8, causal="lower_right",
        features="cached page=16",
    )  # fmt: skip
    cell = Cell(group="decoding, pages", shape=shape, lengths=(20, 32))
    table = torch.tensor([[2, 0], [3, 1]])
    key, value = torch.randn(2, 4, 16, 2, 8)
    problem = Problem(cell=cell, query=torch.randn(2, 3, 4, 8), key=key, value=value, table=table)
    out = attend_pages(problem)
    for number, count in enumerate(cell.lengths):
        rows = [tensor[table[number]].flatten(0, 1)[:count].repeat_interleave(2, 1) for tensor in (key, value)]
        scores = torch.einsum("qhd,khd->hqk", problem.query[number], rows[0]) * problem.scale
        hidden = torch.arange(count)[None] > torch.arange(3)[:, None] + count - 3
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        torch.testing.assert_close(out[number], torch.einsum("hqk,khd->qhd", weights, rows[1]))


class TurnsClock(CudaClock):
    """A clock that says how long each launch takes by who it is."""

    def __init__(self) -> None:
        pass

    def heat(self, launch: Any, seconds: float) -> None:
        launch()

    def rounds(self, launches: Any, count: int) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(1000.0 * float(launch()[0].sum()) for launch in launches) for _ in range(count))


class Served(ServedBy):
    """Nothing is known of who serves, but that kernels do."""

    def __init__(self, *kernels: str) -> None:
        self.kernels = list(kernels) or ["flash_fwd_hopper"]

    def since_last(self) -> list[str]:
        return self.kernels

    def failed_launches(self) -> list[str]:
        return []


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What is measured of a cell by the results of everybody, an error where one is raised."""

    def row(results: dict[str, Any]) -> dict[str, Any]:
        def run_of(name: str, problem: Problem) -> Any:
            found = results[name]
            if isinstance(found, Exception):
                raise found
            return lambda: (found,)

        monkeypatch.setattr(measuring, "run_of", run_of)
        said: list[str] = []
        found = Measuring(TurnsClock(), said.append, Served()).row(CELL, ("fa2", "cudnn", "fa4"), {"fa4": "late"})
        assert said[0] == "fa2"
        return found

    tensors = torch.ones(1)
    monkeypatch.setattr(Problem, "of", lambda cell: Problem(cell=cell, query=tensors, key=tensors, value=tensors))
    monkeypatch.setattr(measuring, "expected_of", lambda cell: {"kernel": "flash_fwd"})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return row


def test_times_of_pytorch_do_not_stand_for_ours() -> None:
    assert Measuring(TurnsClock(), print, Served())._kernels_of_ours() == ["flash_fwd_hopper"]
    with pytest.raises(UsageError, match="Ours did not serve it, but pytorch"):
        Measuring(TurnsClock(), print, Served("pytorch"))._kernels_of_ours()


def near_one(value: float) -> Tensor:
    return torch.tensor([1.0, value, 0.0])


def test_a_cell_has_times_ratios_and_reasons(measured: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    row = measured({"ours": near_one(1.0), "fa2": near_one(1.01), "cudnn": UsageError("no such width\nat all")})
    assert row["times_us"] == {"ours": 2000.0, "fa2": 2010.0}
    assert (row["fastest"], row["ratio"], row["checked_with"]) == ("fa2", 1.005, "fa2")
    assert row["refused"] == {"fa4": "late", "cudnn": "UsageError: no such width"}
    assert row["rounds"] == measuring.ROUNDS[1]


def test_whoever_is_wrong_is_not_timed(measured: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    row = measured({"ours": near_one(1.0), "fa2": near_one(1.0), "cudnn": near_one(2.0)})
    assert "wrong: result 0 differs" in row["refused"]["cudnn"]
    assert row["ratio"] == 1.0
    row = measured({"ours": near_one(2.0), "fa2": near_one(1.0), "cudnn": near_one(1.0)})
    assert "Ours are wrong" in row["error"]
    assert "ratio" not in row


def end_or_hang(connection: Connection) -> None:
    """Stand in for the process that measures: fa2 ends it, fa4 hangs."""
    connection.send("ready")
    while True:
        cell, names, refused = connection.recv()
        for name in (name for name in names if name not in refused):
            connection.send(name)
            if name == "fa2":
                os._exit(1)
            if name == "fa4":
                time.sleep(60)
        connection.send({**cell.to_json(), "refused": refused})


def test_whoever_ends_or_holds_up_the_process_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_serve", end_or_hang)
    monkeypatch.setattr(apart, "TURN_SECONDS", 1.0)
    with MeasuringProcess() as process:
        row = process.row(CELL, ("cudnn", "fa2", "fa4"), {})
    assert row["refused"] == {"fa2": "the process ended", "fa4": "no answer within 1 s"}

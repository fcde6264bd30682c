"""Shapes that are drawn for a GPU, and the table of what they got."""

import json
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.values.config import KernelConfig
from tools.bench.drawn_peers.draw import drawn_cells
from tools.bench.drawn_shapes import draw_shapes, over_fastest
from tools.pages.pages import with_results
from tools.pages.searches import drawn_tables


def test_shapes_are_those_of_the_bench_next_to_peers() -> None:
    assert draw_shapes(5, 28) == [cell.shape for cell in drawn_cells(5, 28)]


def test_a_loss_is_paired_by_round() -> None:
    one, other = (KernelConfig("flash_fwd", block_m=rows, block_n=64, num_warps=4, num_stages=2) for rows in (64, 128))
    rounds = {one: (10.0, 20.0, 30.0), other: (11.0, 22.0, 33.0)}
    assert over_fastest(rounds, other) == pytest.approx(1.1)
    assert over_fastest(rounds, one) == 1.0


def row(label: str, seqlen_q: int, loss: float, *, slower: bool = False) -> dict[str, Any]:
    return {
        "shape": {"label": label, "seqlen_q": seqlen_q},
        "untuned": {"time_us": 100.0 * loss},
        "tuned": {"time_us": 100.0},
        "untuned_over_fastest": loss,
        "tuned_is_slower": slower,
        "seconds": 6.25,
    }


def test_the_table_begins_with_the_greatest_loss_and_sums_up(tmp_path: Path) -> None:
    document = {
        "format": drawn_tables.FORMAT,
        "schema": drawn_tables.SCHEMA,
        "created_at": "2026-11-26T12:00:00+00:00",
        "commit": "0123456789abcdef",
        "device": "NVIDIA H200",
        "seed": 7,
        "drawn": 20,
        "rows": [row("long", 4096, 1.0), row("few", 1, 1.21), row("fewer", 4, 1.0, slower=True)],
    }
    (tmp_path / "h200.drawn.json").write_text(json.dumps(document))
    page = with_results("<!-- results h200.drawn.json -->\n<!-- /results -->", tmp_path)
    assert "3 of 20 shapes drawn with seed 7, on NVIDIA H200 on 2026-11-26" in page
    assert page.index("| few |") < page.index("| long |")
    assert "geometric mean 1.066, 95th percentile 1.210, worst 1.210, decoding and few queries alone 1.100 (2)" in page
    assert "Tuning made 1 of them slower" in page
    assert drawn_tables.NOTHING_DRAWN in with_results("<!-- results a.drawn.json -->\n<!-- /results -->", tmp_path)

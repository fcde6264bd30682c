"""The page of bars: what is measured of each, and that nothing below is left out."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from blocktune.cli.pages.bars import tables
from blocktune.cli.pages.bars.bar import Bar
from blocktune.cli.pages.bars.cells import Cell, Measurement
from blocktune.cli.pages.bars.choices import backwards, forwards, words
from blocktune.cli.pages.bars.sources import BenchRows, Newest, PeerRows, TableRows
from blocktune.tuner.candidates.shape_defaults import complete_shape

RESULTS = Path(__file__).parents[4] / "results"
ENVIRONMENT = {"triton": "3.6.0", "torch": "2.11.0", "cudnn": "9.19.0", "peers": {"fa4": "flash-attn-4 4.0.0b36"}}
GROUPED = {
    "batch": 1, "num_heads": 16, "num_heads_kv": 2, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 128,
    "head_dim_v": 128, "causal": "lower_right", "direction": "backward", "dtype": "bfloat16",
}  # fmt: skip


def contender(name: str, median_us: float) -> dict[str, Any]:
    return {"name": name, "problem": "", "timing": {"median_us": median_us}}


def write_bench(path: Path, *times_us: dict[str, float], seqs: tuple[int, ...] = (1024, 2048)) -> None:
    """Write a bench with one row for every sequence, whose contenders took these times."""
    rows = [
        {"shape": complete_shape(seq, 128, causal=True).to_json(), "commit": "abcdef0123456789",
         "contenders": [contender(name, us) for name, us in times.items()]}
        for seq, times in zip(seqs, times_us, strict=False)
    ]  # fmt: skip
    document = {"schema": 1, "format": "blocktune-bench", "regime": "burst", "created_at": "2026-01-02T03:04:05+00:00"}
    path.write_text(
        json.dumps(document | {"device": {"name": "NVIDIA H200"}, "environment": ENVIRONMENT, "rows": rows})
    )


def write_table(path: Path, columns: list[str], *rows: list[str]) -> None:
    document = {"schema": 1, "format": "blocktune-table", "device": "NVIDIA H100 80GB HBM3", "commit": "0" * 40}
    document |= {"created_at": "2026-01-03T00:00:00+00:00", "environment": {"torch": "2.11.0", "cudnn": "91900"}}
    path.write_text(json.dumps(document | {"columns": columns, "rows": rows}))


def write_peers(path: Path, *rows: dict[str, Any]) -> None:
    document = {"schema": 1, "format": "blocktune-backward-peers", "device": "NVIDIA H200", "environment": {}}
    document |= {"created_at": "2026-01-01T00:00:00+00:00", "rows": [{"commit": "a" * 40} | row for row in rows]}
    path.write_text(json.dumps(document))


def read(source: Any, folder: Path) -> Measurement:
    (found,) = source.read(folder)
    assert isinstance(found, Measurement)
    return found


def test_a_bench_is_compared_with_the_fastest_peer(tmp_path: Path) -> None:
    times = {"untuned": 100.0, "default": 90.0, "fa2": 50.0, "cudnn": 120.0, "fa4": 110.0}
    write_bench(tmp_path / "x.bench.json", times, {"tuned": 100.0, "cudnn": 95.0})
    found = read(BenchRows(file="x.bench.json"), tmp_path)
    assert found.cells == (
        Cell(label="b16 h16 s1024 d128 causal", ratio=1.1, rival="FA4"),
        Cell(label="b8 h16 s2048 d128 causal", ratio=0.95, rival="cuDNN"),
    )
    assert (found.device, found.rivals) == ("H200", ("cuDNN", "FA4"))
    assert found.software["flash-attn-4"] == "4.0.0b36"
    assert read(BenchRows(file="x.bench.json", rivals=("fa4",)), tmp_path).rivals == ("FA4",)


def test_groups_count_in_the_parts_of_the_default_and_block_masks_on_the_pairs_that_take_part(tmp_path: Path) -> None:
    write_peers(
        tmp_path / "x.backward-peers.json",
        {"shape": GROUPED, "time_us": {"parts 1": 900.0, "parts 4": 400.0, "cuDNN": 500.0, "flash-attn-4": 440.0}},
        {"shape": GROUPED | {"num_heads_kv": 16, "features": "block_sparse"}, "share": 0.25,
         "time_us": {"default": 100.0, "dense": 320.0}},
    )  # fmt: skip
    groups = read(PeerRows(file="x.backward-peers.json", shapes=backwards(128, grouped=True)), tmp_path)
    assert groups.cells == (Cell(label="b1 h16/2 s4096 d128 causal", ratio=1.1, rival="FA4"),)
    masked = backwards(128, features="block_sparse")
    dense = read(PeerRows(file="x.backward-peers.json", shapes=masked, rivals=("dense",), of_share=True), tmp_path)
    assert [cell.ratio for cell in dense.cells] == [0.8]


def test_a_table_has_its_ratio_in_a_column(tmp_path: Path) -> None:
    write_table(tmp_path / "x.table.json", ["shape", "rate"], ["s1 alibi", "0.950"], ["s2 alibi", "-"], ["s3", "0.1"])
    found = read(TableRows(file="x.table.json", column="rate", rival="plain call", rows=words("alibi")), tmp_path)
    assert [(cell.label, cell.ratio) for cell in found.cells] == [("s1 alibi", 0.95)]
    assert found.software == {"torch": "2.11.0"}
    assert TableRows(file="x.table.json", column="absent", rival="plain call").read(tmp_path) == []


def test_each_cell_is_that_of_the_newest_file_and_older_ones_keep_what_was_not_measured_again(tmp_path: Path) -> None:
    write_bench(tmp_path / "x.bench.json", {"tuned": 100.0, "cudnn": 110.0}, {"tuned": 100.0, "cudnn": 120.0})
    write_table(tmp_path / "x.table.json", ["shape", "over"], ["b8 h16 s2048 d128 causal", "1.5"])
    sources = BenchRows(file="x.bench.json"), TableRows(file="x.table.json", column="over", rival="cuDNN")
    newer, older = Newest(*sources).read(tmp_path)
    assert [(cell.label, cell.ratio) for cell in newer.cells] == [("b8 h16 s2048 d128 causal", 1.5)]
    assert [(cell.label, cell.ratio) for cell in older.cells] == [("b16 h16 s1024 d128 causal", 1.1)]
    assert Newest(BenchRows(file="none.bench.json")).read(tmp_path) == []


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [(forwards(128), True), (backwards(128), False), (forwards(64), False), (forwards(128, narrow=True), False)],
)
def test_a_bar_takes_only_its_own_shapes(chosen: Any, expected: bool) -> None:
    assert chosen(complete_shape(1024, 128, causal=True)) is expected


def test_what_is_below_is_named_with_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bench(tmp_path / "x.bench.json", {"tuned": 100.0, "cudnn": 104.0}, {"tuned": 100.0, "cudnn": 99.0})
    bars = (
        Bar(what="met", least=0.9, sources=(BenchRows(file="x.bench.json"),)),
        Bar(what="missed", least=1.0, mean=1.05, sources=(BenchRows(file="x.bench.json"),), limit="Because."),
        Bar(what="absent", least=1.0, sources=(BenchRows(file="none.bench.json"),)),
    )
    monkeypatch.setattr(tables, "BARS", bars)
    lines = tables.block(tmp_path).splitlines()
    assert "| absent | 1.00 | not measured | - | - | - | - | - | - |" in lines
    assert "| met | 0.90 | H200, 2026-01-02, abcdef0123 | cuDNN | 2 | 0.990 | 1.040 | 1.015 | 0 |" in lines
    missed = "- **missed**, 1.00, mean 1.05. H200: b8 h16 s2048 d128 causal 0.990; mean 1.015. Because."
    assert [line for line in lines if line.startswith("- ")] == [missed]


def test_every_cell_below_its_bar_is_on_the_page() -> None:
    text = tables.block(RESULTS)
    below = [cell for bar in tables.BARS for cell in _below(bar)]
    assert len(below) > 20
    assert all(f"{cell.label} {cell.ratio:.3f}" in text for cell in below)
    counted = [int(line.split("|")[-2]) for line in text.splitlines() if re.match(r"\| .* \d \|$|\| .* \d\d \|$", line)]
    assert sum(counted) == len(below)


def _below(bar: Bar) -> list[Cell]:
    found = [measurement for source in bar.sources for measurement in source.read(RESULTS)]
    return [cell for measurement in found for cell in measurement.cells if cell.ratio < bar.least]

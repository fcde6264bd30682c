"""The page of targets: what is measured of each, and that nothing below is left out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.values.features import Features
from blocktune.tuner.candidates.shape_defaults import complete_shape
from tools.pages.targets import tables
from tools.pages.targets.cells import Cell, Measurement, Record, merge_cells
from tools.pages.targets.choices import backwards, biased_shapes, forwards, words
from tools.pages.targets.sources import BenchRows, PeerRows, TableRows
from tools.pages.targets.standings import standings
from tools.pages.targets.target import Target, Topic

ROOT = Path(__file__).parents[4]
RESULTS = ROOT / "results"
ENVIRONMENT = {"triton": "3.6.0", "torch": "2.11.0", "cudnn": "9.19.0", "peers": {"fa4": "flash-attn-4 4.0.0b36"}}
GROUPED = {
    "batch": 1, "num_heads": 16, "num_heads_kv": 2, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 128,
    "head_dim_v": 128, "causal": "lower_right", "direction": "backward", "dtype": "bfloat16",
}  # fmt: skip


def contender(name: str, median_us: float) -> dict[str, Any]:
    return {"name": name, "problem": "", "timing": {"median_us": median_us}}


def write_bench(path: Path, *times_us: dict[str, float], seqs: tuple[int, ...] = (1024, 2048), **document: Any) -> None:
    """Write a bench with one row for every sequence, whose contenders took these times."""
    rows = [
        {"shape": complete_shape(seq, 128, causal=True).to_json(), "commit": "abcdef0123456789",
         "contenders": [contender(name, us) for name, us in times.items()]}
        for seq, times in zip(seqs, times_us, strict=False)
    ]  # fmt: skip
    own = {"schema": 1, "format": "blocktune-bench", "regime": "burst", "created_at": "2026-01-02T03:04:05+00:00"}
    own |= {"device": {"name": "NVIDIA H200"}, "environment": ENVIRONMENT, "rows": rows}
    path.write_text(json.dumps(own | document))


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
    record = Record(file="x.bench.json", taken_at="2026-01-02T03:04:05+00:00", commit="abcdef0123456789")
    assert found.cells == (
        Cell(label="b16 h16 s1024 d128 causal", ratio=1.1, rival="FA4", record=record),
        Cell(label="b8 h16 s2048 d128 causal", ratio=0.95, rival="cuDNN", record=record),
    )
    assert (found.device, found.rivals) == ("H200", ("cuDNN", "FA4"))
    assert found.software["flash-attn-4"] == {"4.0.0b36"}
    assert read(BenchRows(file="x.bench.json", rivals=("fa4",)), tmp_path).rivals == ("FA4",)


def test_groups_count_in_the_parts_of_the_default_and_block_masks_on_the_pairs_that_take_part(tmp_path: Path) -> None:
    write_peers(
        tmp_path / "x.backward-peers.json",
        {"shape": GROUPED, "time_us": {"parts 1": 900.0, "parts 4": 400.0, "cuDNN": 500.0, "flash-attn-4": 440.0}},
        {"shape": GROUPED | {"num_heads_kv": 16, "features": "block_sparse"}, "share": 0.25,
         "time_us": {"default": 100.0, "dense": 320.0}},
    )  # fmt: skip
    groups = read(PeerRows(file="x.backward-peers.json", shapes=backwards(128, grouped=True)), tmp_path)
    assert [(cell.label, cell.ratio, cell.rival) for cell in groups.cells] == [
        ("b1 h16/2 s4096 d128 causal", 1.1, "FA4")
    ]
    masked = backwards(128, features="block_sparse")
    dense = read(PeerRows(file="x.backward-peers.json", shapes=masked, rivals=("dense",), of_share=True), tmp_path)
    assert [cell.ratio for cell in dense.cells] == [0.8]


def test_a_table_has_its_ratio_in_a_column(tmp_path: Path) -> None:
    write_table(tmp_path / "x.table.json", ["shape", "rate"], ["s1 alibi", "0.950"], ["s2 alibi", "-"], ["s3", "0.1"])
    found = read(TableRows(file="x.table.json", column="rate", rival="plain call", rows=words("alibi")), tmp_path)
    assert [(cell.label, cell.ratio) for cell in found.cells] == [("s1 alibi", 0.95)]
    assert found.software == {"torch": {"2.11.0"}}
    assert TableRows(file="x.table.json", column="absent", rival="plain call").read(tmp_path) == []


def test_a_cell_is_that_of_the_newest_row_whichever_file_has_it(tmp_path: Path) -> None:
    write_bench(tmp_path / "x.bench.json", {"tuned": 100.0, "cudnn": 110.0}, {"tuned": 100.0, "cudnn": 120.0})
    peers = {"shape": complete_shape(2048, 128, causal=True).to_json(), "time_us": {"default": 100.0, "cuDNN": 150.0}}
    write_peers(tmp_path / "x.backward-peers.json", peers | {"taken_at": "2026-01-03T00:00:00+00:00"})
    sources = BenchRows(file="x.bench.json"), PeerRows(file="x.backward-peers.json", shapes=forwards(128))
    for order in (sources, sources[::-1]):
        (found,) = merge_cells(measurement for source in order for measurement in source.read(tmp_path))
        ratios = {cell.label: (cell.ratio, cell.record.file) for cell in found.cells}
        assert ratios == {
            "b16 h16 s1024 d128 causal": (1.1, "x.bench.json"),
            "b8 h16 s2048 d128 causal": (1.5, "x.backward-peers.json"),
        }


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [(forwards(128), True), (backwards(128), False), (forwards(64), False), (forwards(128, narrow=True), False)],
)
def test_a_bar_takes_only_its_own_shapes(chosen: Any, expected: bool) -> None:
    assert chosen(complete_shape(1024, 128, causal=True)) is expected


def test_masks_and_alibi_of_both_directions_are_told_apart() -> None:
    shape = complete_shape(1024, 128, causal=True)
    alibi = replace(shape, features=Features.parse("alibi"))
    assert biased_shapes(forwards)(alibi)
    assert not any((biased_shapes(backwards)(alibi), biased_shapes(forwards)(shape)))


def bars_of(tmp_path: Path) -> tuple[Target, ...]:
    """Return a target that is met, one that is missed on two devices, and one without a measurement."""
    write_bench(tmp_path / "x.bench.json", {"tuned": 100.0, "cudnn": 104.0}, {"tuned": 100.0, "cudnn": 99.0})
    device = {"name": "NVIDIA H100 80GB HBM3"}
    write_bench(tmp_path / "y.bench.json", {"tuned": 100.0, "cudnn": 98.0}, device=device, regime="sustained")
    sources = BenchRows(file="y.bench.json"), BenchRows(file="x.bench.json")
    return (
        Target(what="forward, met", least=0.9, sources=sources[1:]),
        Target(what="forward, missed", least=1.0, mean=1.05, sources=sources, limit="Because."),
        Target(what="forward, absent", least=1.0, sources=(BenchRows(file="none.bench.json"),)),
    )


def test_a_topic_has_its_bars_with_the_first_device_first_then_what_is_below_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "TOPICS", {"some": Topic(title="Some", targets=bars_of(tmp_path))})
    targets, below, reasons = tables.block("some", tmp_path).split("\n\n")
    assert targets.splitlines()[2:] == [
        "| met | 0.90 | H200 | cuDNN | 2 | 0.990 | 1.015 | 1.040 | 0 |",
        "| missed | 1.00, mean 1.05 | H200 | cuDNN | 2 | **0.990** | **1.015** | 1.040 | 1 |",
        "| missed | 1.00, mean 1.05 | H100, sustained | cuDNN | 1 | **0.980** | **0.980** | 0.980 | 1 |",
        "| absent | 1.00 | not measured | - | - | - | - | - | - |",
    ]
    assert below.splitlines()[2:] == [
        "| missed | 1.00 | H200 | b8 h16 s2048 d128 causal | 0.990 | cuDNN |",
        "| missed | mean 1.05 | H200 | all | 1.015 | - |",
        "| missed | 1.00 | H100, sustained | b16 h16 s1024 d128 causal | 0.980 | cuDNN |",
        "| missed | mean 1.05 | H100, sustained | all | 0.980 | - |",
    ]
    assert reasons.splitlines()[2:] == ["| missed | Because. |"]


def test_the_overview_is_of_each_device_and_the_files_are_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "TOPICS", {"some": Topic(title="Some", targets=bars_of(tmp_path))})
    first, met, other, missed = tables.block(None, tmp_path).split("\n\n")
    software = "cudnn 9.19.0, flash-attn-4 4.0.0b36, torch 2.11.0, triton 3.6.0"
    assert (first, other) == (f"H200, with {software}:", f"H100, with {software}:")
    assert met.splitlines()[2:] == ["| Some | 1 of 2 | 3 of 4 | 1.015 | missed: 0.990 for 1.00 |"]
    assert missed.splitlines()[2:] == ["| Some | 0 of 1 | 0 of 1 | 0.980 | missed: 0.980 for 1.00 |"]
    assert tables.block("files", tmp_path).splitlines()[2:] == [
        "| `y.bench.json` | H100, sustained | 2026-01-02 | abcdef0123 | 1 |",
        "| `x.bench.json` | H200 | 2026-01-02 | abcdef0123 | 4 |",
    ]


def test_the_page_has_every_topic_below_its_heading() -> None:
    page = (ROOT / "notes/benchmarks/targets.md").read_text()
    assert all(f"## {topic.title}\n\n<!-- results targets#{part} -->" in page for part, topic in tables.TOPICS.items())


@pytest.mark.parametrize("part", tables.TOPICS)
def test_every_cell_below_its_bar_is_on_the_page_once(part: str) -> None:
    text = tables.block(part, RESULTS)
    found = [
        f"| {each.target.kind} | {each.target.least:.2f}{each.target.suffix} | {each.measured.device} | {cell.label} |"
        for each in standings(tables.TOPICS[part].targets, RESULTS)
        for cell in each.measured.cells
        if cell.ratio < each.target.least
    ]
    assert (" | ".join(tables.MISSES) in text) == bool(found)
    assert all(text.count(line) == 1 for line in found)

"""The tables of features and of the two forms of the backward, made of synthetic files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.candidates.shape_defaults import complete_shape
from tests.tools.pages.test_readme_results import DOCUMENT
from tools.pages.bench_tables import NOTHING, results_block
from tools.pages.feature_tables import feature_tables, passes_table
from tools.pages.pages import with_results

PLAIN = complete_shape(4096, 128, batch=4, heads=16)
WINDOW = replace(PLAIN, features=Features(window=(1023, 0)))
SPARSE = replace(PLAIN, direction=Direction.BACKWARD, features=Features(mask=MaskKind.BLOCK_SPARSE))
PAGED = replace(PLAIN, seqlen_q=1, features=Features(cached=True, page_size=64))
BACKWARD = replace(PLAIN, direction=Direction.BACKWARD)


def entry(name: str, median_us: float, kernel: str | None = None, **timing: Any) -> dict[str, Any]:
    times = {"median_us": median_us, "low_us": 1.0, "high_us": 2.0, "tflops": 1e5 / median_us, "over_cudnn": None}
    config = None if kernel is None else {"kernel": kernel}
    return {"name": name, "config": config, "problem": "", "tuning": None, "timing": times | timing}


def failed(name: str, kernel: str | None) -> dict[str, Any]:
    return entry(name, 1.0, kernel) | {"timing": None, "problem": "a reason"}


def row(shape: AttentionShape, *entries: dict[str, Any]) -> dict[str, Any]:
    return {"shape": shape.to_json(), "contenders": list(entries)}


ROWS = [
    row(SPARSE, entry("tuned", 400.0, "flash_bwd_sparse"), failed("default", "flash_bwd_sparse")),
    row(PAGED, entry("tuned", 20.0, "flash_decode", key_gbs=3500.4), entry("default", 25.0, "flash_decode")),
    row(
        WINDOW,
        entry("tuned", 200.0, "flash_fwd_general"),
        entry("default", 250.0, "flash_fwd_general"),
        failed("cudnn", None),
        entry("flex", 300.0),
    ),
]


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")]


def test_features_are_listed_forwards_first_with_who_took_part() -> None:
    text = feature_tables({"rows": ROWS}, "Caption.")
    header, _, *lines = lines_of(text)
    assert header == (
        "| shape | kernel | default, µs | tuned, µs | tuned over default | FlexAttention, µs "
        "| tuned over fastest rival | TFLOP/s "
        "| GB/s of keys and values |"
    ), "cuDNN took no part"
    assert lines == [
        f"| {WINDOW.label} | flash_fwd_general | 250.0 | 200.0 | 1.250 | 300.0 | 1.500 | 500 | - |",
        f"| {PAGED.label} | flash_decode | 25.0 | 20.0 | 1.250 | - | - | 5000 | 3500 |",
        f"| {SPARSE.label} | flash_bwd_sparse | failed | 400.0 | - | - | - | 250 | - |",
    ]
    means = (
        "1.250 over the default (2 shapes); 1.500 over the fastest rival (1 shape); 1.500 over FlexAttention (1 shape)"
    )
    assert means in text
    assert text.startswith("Caption. All of a row was checked first")
    assert "Operations of a block mask" in text
    assert "block mask" not in feature_tables({"rows": ROWS[1:]}, "Caption.")


def test_a_page_takes_the_table_of_a_file_of_features(tmp_path: Path) -> None:
    page = "before\n<!-- results h200-features.bench.json -->\nold\n<!-- /results -->\nafter\n"
    assert NOTHING in with_results(page, tmp_path)
    (tmp_path / "h200-features.bench.json").write_text(json.dumps(DOCUMENT | {"rows": ROWS}))
    filled = with_results(page, tmp_path)
    without = "Measured without cuDNN, FlashAttention-3 and FlashAttention-4. Measured on NVIDIA H200"
    assert filled.splitlines()[2].startswith(without)
    assert f"| {PAGED.label} | flash_decode |" in filled
    assert "old" not in filled
    assert filled.startswith("before\n")
    assert filled.endswith("after\n")
    (tmp_path / "h200-features.bench.json").write_text(json.dumps(DOCUMENT | {"rows": []}))
    assert NOTHING in with_results(page, tmp_path)


def test_two_passes_stand_against_one_kernel_where_both_took_part() -> None:
    longer = replace(BACKWARD, seqlen_q=8192, seqlen_k=8192)
    rows = [
        row(longer, entry("tuned", 100.0, "flash_bwd_split"), entry("flash_bwd_fused", 200.0, "flash_bwd_fused")),
        row(
            BACKWARD,
            entry("tuned", 50.0, "flash_bwd_hopper"),
            entry("flash_bwd_split", 100.0, "flash_bwd_split"),
            entry("flash_bwd_fused", 80.0, "flash_bwd_fused"),
        ),
        row(SPARSE, entry("tuned", 400.0, "flash_bwd_sparse")),
    ]
    text = passes_table({"rows": rows})
    _, _, *lines = lines_of(text)
    assert lines == [
        "| 128 | 4096 | full | 1000 | 1250 | 1.250 | one kernel |",
        "| 128 | 8192 | full | 1000 | 500 | 0.500 | two passes |",
    ]
    assert "two passes: 0.791 (2 shapes)" in text  # sqrt(1.25 * 0.5)
    assert passes_table({"rows": rows[2:]}) == ""
    block = results_block(DOCUMENT | {"rows": rows})
    assert block.endswith(text)
    assert "Two passes" not in results_block(DOCUMENT)

"""The tables and pictures of the README and the documents are what the code makes of the measured files."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.base.paper_rule import first_paper_config
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import KERNELS, kernels_for
from blocktune.tuner.candidates.shape_defaults import complete_shape
from tools.pages.bench_tables import NO_LOAD, NOTHING, results_block
from tools.pages.pages import draw_picture, pages, pictures, with_results
from tools.pages.readme_rivals import with_todays_rivals

ROOT = Path(__file__).parents[3]


H200 = device_named("h200")


def entry(name: str, tflops: float, **changes: Any) -> dict[str, Any]:
    timing = {"median_us": 1e5 / tflops, "low_us": 1.0, "high_us": 2.0, "tflops": tflops}
    over = {"median": tflops / 500, "low": 0.9, "high": 1.1}
    return {"name": name, "problem": "", "tuning": None, "timing": timing | {"over_cudnn": over}} | changes


def row(seq: int, dim: int, causal: bool, *entries: dict[str, Any]) -> dict[str, Any]:
    return {"shape": complete_shape(seq, dim, causal=causal).to_json(), "contenders": list(entries)}


DOCUMENT = {
    "schema": 1,
    "format": "blocktune-bench",
    "device": H200.to_json(),
    "kernels": ["flash_fwd", "flash_fwd_tma"],
    "environment": {"triton": "3.6.0", "torch": "2.13.0", "cudnn": "9.19.0", "driver": "580.65", "power_limit_w": 700},
    "regime": "burst",
    "created_at": "2026-11-21T10:00:00+00:00",
    "commands": ["tune bench --seq 512"],
    "rows": [
        row(1024, 64, False, entry("tuned", 520.0), entry("cudnn", 500.0)),
        row(
            512,
            64,
            True,
            entry("tuned", 400.0, config={"kernel": "flash_fwd_tma"}),
            entry("cudnn", 500.0),
            entry("paper", 100.0, config={"kernel": "flash_fwd"}),
            entry("default", 1.0, timing=None, problem="RuntimeError"),
            entry("triton_autotune", 390.0, tuning={"cold_seconds": 611.7}),
        ),
        row(512, 128, False, entry("tuned", 600.0), entry("cudnn", 1.0, timing=None, problem="no kernel")),
    ],
}


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_pages_show_the_measured_files(page: Path) -> None:
    text = page.read_text()
    assert with_results(text, ROOT / "results") == text, "run `make results`"


@pytest.mark.parametrize("picture", pictures(ROOT), ids=lambda path: path.name)
def test_the_pictures_show_the_measured_files(picture: Path) -> None:
    assert draw_picture(pictures(ROOT)[picture]) == picture.read_text(), "run `make results`"


def test_the_readme_shows_a_picture_that_is_drawn_here() -> None:
    shown = re.findall(r"!\[[^]]*\]\((?!https:)(\S+)\)", (ROOT / "README.md").read_text())
    assert len(shown) == 3
    assert {ROOT / name for name in shown} <= set(pictures(ROOT))


def test_the_readme_has_results() -> None:
    assert NOTHING not in (ROOT / "README.md").read_text()


def test_without_a_file_the_block_says_so() -> None:
    assert results_block(None) == NOTHING
    assert results_block(DOCUMENT | {"rows": []}) == NOTHING


def test_tables_hold_every_row_in_order() -> None:
    block = results_block(DOCUMENT)
    lines = block.splitlines()
    assert "| 512 | causal | failed | 100 | 390 (612 s) | 400 | 500 | 0.800 (0.900 to 1.100), cuDNN |" in lines
    assert "| 1024 | full | - | - | - | 520 | 500 | 1.040 (0.900 to 1.100), cuDNN |" in lines
    assert lines.index("Head dimension 64, TFLOP/s:") < lines.index("Head dimension 128, TFLOP/s:")
    assert block.index("| 512 | causal") < block.index("| 1024 | full")
    assert "NVIDIA H200 on 2026-11-21 (triton 3.6.0, torch 2.13.0, cudnn 9.19.0, driver 580.65" in block
    assert "kernels flash_fwd, flash_fwd_tma, by `tune bench --seq 512`" in block
    assert "0.912 over cuDNN (2 shapes)" in block  # sqrt(0.8 * 1.04)


def test_every_kernel_has_a_column_where_its_best_config_took_part_throughout() -> None:
    first = row(512, 64, False, entry("tuned", 520.0, config={"kernel": "flash_fwd"}), entry("flash_fwd_tma", 390.0))
    other = row(512, 64, True, entry("tuned", 1.0, config={"kernel": "flash_fwd_tma"}), entry("flash_fwd", 300.0))
    block = results_block(DOCUMENT | {"rows": [first, other]})
    header, full, causal = (line for line in block.splitlines() if line.startswith(("| seqlen", "| 512")))
    assert header.endswith("| tuned / fastest rival | flash_fwd_tma | flash_fwd |")
    assert full.endswith("| 390 | 520 |")  # the kernel that won has its time, too
    assert causal.endswith("| 1 | 300 |")
    assert "A column with the name of a kernel" in block
    assert "A column with the name of a kernel" not in results_block(DOCUMENT)
    without = row(1024, 64, False, entry("tuned", 530.0, config={"kernel": "flash_fwd"}))
    (header,) = (
        line for line in results_block(DOCUMENT | {"rows": [first, without]}).splitlines() if "cuDNN |" in line
    )
    assert header.endswith("| tuned / fastest rival |")


def test_a_rival_that_the_kernels_do_not_have_any_more_has_no_figure() -> None:
    shape = complete_shape(2048, 128)
    kernels = kernels_for(shape, H200.limits)
    default, paper = kernels[0].default_config(shape, H200.limits), first_paper_config(kernels, shape, H200.limits)
    assert paper is not None
    older = replace(default, num_stages=7)
    rows = [
        row(
            2048,
            128,
            False,
            entry("default", rate, config=config.to_json()),
            entry("paper", 50.0, config=paper.to_json()),
        )
        for rate, config in ((71.0, default), (72.0, older))
    ]
    block = results_block(with_todays_rivals(DOCUMENT | {"kernels": list(KERNELS), "rows": rows}))
    assert "| 2048 | full | 71 | 50 |" in block
    assert "| 2048 | full | - | 50 |" in block
    assert "No figure, until it is measured again, of the default in 1 rows:" in block
    some = DOCUMENT | {"kernels": ["flash_fwd"], "rows": rows[:1]}
    assert "| 2048 | full | - | - |" in results_block(with_todays_rivals(some)), "a bench of some kernels has theirs"


SUSTAINED = DOCUMENT | {
    "regime": "sustained",
    "rows": [
        row(seq, 64, False, entry("tuned", 520.0), entry("cudnn", 500.0))
        | {
            "load": {"sm_clock_mhz": [1560, 1605, 1650], "power_w": power_w, "at_power_limit": held},
            "commit": "0123456789abcdef",
        }
        for seq, power_w, held in ((512, None, False), (1024, 691.4, True))
    ],
}


def test_a_table_under_sustained_load_proves_it_in_every_row() -> None:
    block = results_block(SUSTAINED)
    lines = block.splitlines()
    assert "| 1024 | full | - | - | - | 520 | 500 | 1.040 (0.900 to 1.100), cuDNN | 1560 to 1650 | 691 |" in lines
    assert "in 1 of 2 rows the power limit held the clock down" in block
    assert "Commit 0123456789." in block


def test_sustained_load_that_is_not_proved_has_no_table() -> None:
    rows = [SUSTAINED["rows"][0], {name: value for name, value in SUSTAINED["rows"][1].items() if name != "load"}]
    assert results_block(SUSTAINED | {"rows": rows}) == NO_LOAD


def test_a_peer_that_was_asked_for_has_a_column_and_a_mean() -> None:
    first, other = row(512, 64, False, entry("tuned", 520.0), entry("flex", 260.0)), row(512, 64, True)
    block = results_block(DOCUMENT | {"rows": [first, other]})
    header, full, causal = (line for line in block.splitlines() if line.startswith(("| seqlen", "| 512")))
    assert header.endswith("| tuned / fastest rival | FlexAttention |")
    assert full.endswith("| 260 |")
    assert causal.endswith("| - |")
    assert "2.000 over FlexAttention (1 shape)" in block


def test_the_fastest_peer_counts_and_who_is_missing_is_said_first() -> None:
    tuned, third = entry("tuned", 520.0), entry("fa3", 650.0)
    paired = {"median": 0.81, "low": 0.8, "high": 0.82}
    later = entry("tuned", 520.0) | {"timing": tuned["timing"] | {"over_best": paired}}
    rows = [row(512, 64, False, tuned, entry("cudnn", 500.0), third), row(512, 64, True, later, third)]
    document = DOCUMENT | {"rows": rows, "environment": DOCUMENT["environment"] | {"peers": {"fa3": "fa3-fwd 0.0.3"}}}
    block = results_block(document)
    assert "| 512 | full | - | - | - | 520 | 500 | 0.800, FA3 | 650 |" in block.splitlines(), "rounds are not paired"
    assert "| 512 | causal | - | - | - | 520 | - | 0.810 (0.800 to 0.820), FA3 | 650 |" in block.splitlines()
    assert block.startswith("Measured without FlashAttention-4. Measured on NVIDIA H200")
    assert "driver 580.65, fa3-fwd 0.0.3, power limit" in block
    assert "0.800 over the fastest rival (2 shapes); 1.040 over cuDNN (1 shape)" in block
    assert block.index("over the fastest rival") < block.index("over FlashAttention-3 (2 shapes)")


def test_the_command_fills_the_blocks_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.bench.json").write_text(json.dumps(DOCUMENT))
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)
    (tmp_path / "README.md").write_text("a\n<!-- results a.bench.json -->\nold\n<!-- /results -->\nb\n")
    (tmp_path / "docs" / "benchmarks" / "a.bench.svg").touch()
    (tmp_path / "docs" / "benchmarks" / "page.md").write_text("<!-- results b.bench.json -->\nold\n<!-- /results -->\n")
    command = [sys.executable, "-P", "-m", "tools.pages.pages"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    readme = (tmp_path / "README.md").read_text()
    assert (
        readme
        == f"a\n<!-- results a.bench.json -->\n{results_block(with_todays_rivals(DOCUMENT))}\n<!-- /results -->\nb\n"
    )
    assert NOTHING in (tmp_path / "docs" / "benchmarks" / "page.md").read_text()
    assert (tmp_path / "docs" / "benchmarks" / "a.bench.svg").read_text() == draw_picture(
        tmp_path / "results" / "a.bench.json"
    )

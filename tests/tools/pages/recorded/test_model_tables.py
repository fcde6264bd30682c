"""The table of whole models is that of the bench's file, or says how it comes about."""

import json
from pathlib import Path
from typing import Any

from tools.pages.pages import with_results
from tools.pages.recorded.model_tables import FORMAT, SCHEMA

PAGE = "<!-- results gpu.models.json -->\nbefore\n<!-- /results -->"


def spread(median: float) -> dict[str, float]:
    return {"median": median, "low": 0.9 * median, "high": 1.1 * median}


def row(mode: str, times: dict[str, float], refused: dict[str, str]) -> dict[str, Any]:
    return {
        "model": "Llama, decoding",
        "mode": mode,
        "sizes": {},
        "step_us": {name: spread(time) for name, time in times.items()},
        "ratios": {name: spread(time / times["blocktune"]) for name, time in times.items() if name != "blocktune"},
        "refused": refused,
    }


def test_without_a_file_the_page_says_how_it_comes_about(tmp_path: Path) -> None:
    assert "make model-bench" in with_results(PAGE, tmp_path)


def test_every_row_has_times_and_ratios_and_who_refused_is_named(tmp_path: Path) -> None:
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "device": "NVIDIA H200",
        "environment": {"torch": "2.11.0", "triton": "3.6.0", "driver": "580"},
        "created_at": "2026-11-23T10:00:00+00:00",
        "rounds": 21,
        "steps": 16,
        "rows": [
            row("eager", {"blocktune": 2000.0, "sdpa": 3000.0}, {"cudnn": "RuntimeError: No available kernel."}),
            row("CUDA graph", {"blocktune": 1000.0, "sdpa": 1100.0, "cudnn": 950.0}, {}),
        ],
    }
    (tmp_path / "gpu.models.json").write_text(json.dumps(document))
    text = with_results(PAGE, tmp_path)
    assert "| Llama, decoding | eager | 2,000 | 3,000 | - | 1.500 (1.350 to 1.650) | - |" in text
    assert "| 1,000 | 1,100 | 950 | 1.100 (0.990 to 1.210) | 0.950 (0.855 to 1.045) |" in text
    assert "Not timed: cuDNN in Llama, decoding, eager: RuntimeError: No available kernel." in text
    assert "NVIDIA H200, 2026-11-23 (torch 2.11.0, triton 3.6.0, driver 580)" in text

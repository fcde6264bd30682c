"""The tables of libraries' kernels are those of the bench's file, or say how it comes about."""

import json
from pathlib import Path
from typing import Any

from tests.support.libraries.document import FORMAT, SCHEMA
from tools.pages.pages import with_results

PAGE = "<!-- results gpu.libraries.json -->\nbefore\n<!-- /results -->"


def kernel(name: str, best_us: float, winner: float, stock: float, gain: float) -> dict[str, Any]:
    return {
        "step": "fla gla",
        "kernel": f"fla.ops:{name}",
        "key": "n=1",
        "configs": 12,
        "first_us": 2 * best_us,
        "best": {"config": "a", "time_us": best_us},
        "winner": {"config": "a", "time_us": best_us, "over_best": winner},
        "stock": {"config": "b", "time_us": best_us, "over_best": stock},
        "same_of_repeats": 9,
        "expanded": {"config": "c", "time_us": best_us, "gain": gain},
    }


def start(tuner: str, kind: str, seconds: float | None) -> dict[str, Any]:
    return {
        "model": "fla",
        "tuner": tuner,
        "start": kind,
        "step_seconds": seconds,
        "longest_seconds": 450.0,
        "error": "",
    }


def helion(example: str, error: str) -> dict[str, Any]:
    times = {} if error else {"helion_seconds": 50.0, "ours_us": 20.0, "helion_us": 25.0, "difference": 1e-3}
    told = {"helion": "1.5.1", "helion_limit_seconds": 60, "error": error}
    return {"example": example, "ours_seconds": 4.0, **told, **times}


def test_without_a_file_the_page_says_how_it_comes_about(tmp_path: Path) -> None:
    assert "were not measured yet" in with_results(PAGE, tmp_path)


def test_kernels_starts_and_processes_have_their_lines(tmp_path: Path) -> None:
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "device": "NVIDIA H200",
        "date": "2026-11-23",
        "software": {"triton": "3.6.0"},
        "kernels": [kernel("one", 10.0, 0.0, 0.02, 1.2), kernel("two", 20.0, 0.005, 0.0, 1.0)],
        "steps": [
            {"step": "fla gla", "error": "", "difference": {"winner": 1e-3, "expanded": 2e-3}},
            {"step": "fla kda", "error": "ValueError: no such shape", "difference": {}},
        ],
        "starts": [
            start("stock", "cold", None) | {"meanwhile": "a compile on 8 cores"},
            start("blocktune", "cold", 45.0),
            start("stock", "second", 50.0),
            start("blocktune", "second", 4.0),
            start("stock", "third", None) | {"error": "no library"},
        ],
        "processes": [
            {"model": "fla", "processes": 8, "kinds_of_calls": 9, "tuned_in_all": 9, "disagreements": 0, "ended": 8}
        ],
        "ranks": [{"scene": "one dies", "ranks": [None, *[{"tuned": rank == 1, "config": "a"} for rank in (1, 2, 3)]]}],
        "faults": [
            {
                "kernel": "m:f",
                "configs": 4,
                "lost": {"f BLOCK=256": "run_error: no answer within 8 s", "f BLOCK=512": "run_error: died"},
                "equal": True,
                "answer_seconds": 8.0,
                "seconds": 15.2,
            }
        ],
        "helion": [helion("softmax", ""), helion("matmul", "ValueError: no such layout")],
        "calls": [{"kernel": "fla.ops:one", "launch_us": 10.0, "stock_us": 20.0, "ours_us": 14.0}],
    }
    (tmp_path / "gpu.libraries.json").write_text(json.dumps(document))
    page = with_results(PAGE, tmp_path)
    assert "the winner is 0.25% slower than the best config" in page
    assert "18 of 20 searches from nothing found the winner that is usual for their kernel; on 2 of 2 kernels" in page
    assert "With `expand` 1 of 2 are at least 1.10 times as fast as with Triton's choice, 1.20 times at most" in page
    assert "| `one` (fla gla) | 12 | 20.0 µs | 10.0 µs | 0.00% | 2.00% | 9 | 1.20 |" in page
    assert "1 passes are compared with those under Triton's choices: the relative difference is 2.0e-03 at most" in page
    assert "- fla kda failed: ValueError: no such shape" in page
    assert "| fla, cold start | more than 450 s | 45.0 s | more than 10.0 |" in page
    assert "| fla, second start | 50.0 s | 4.0 s | 12.5 |" in page
    assert "| fla, third start | failed | - | - |" in page
    assert "Triton's tuner started while the machine ran a compile on 8 cores." in page
    assert "8 processes that started the fla step at once" in page
    assert "| one dies | 4 | 3 | 1 | 1 |" in page
    assert "in the median 0.40 of Triton's" in page
    assert "| `one` | 10.0 µs | 4.0 µs | 0.40 |" in page
    assert "a kernel lost 2 of 4 configs, in 15 s; no answer within 8 s is a hang here. Its result equals" in page
    assert "- `BLOCK=256`: run_error: no answer within 8 s" in page
    assert "| softmax | 4.0 s | 50.0 s | 20.0 µs | 25.0 µs | 1.25 |" in page
    assert "- matmul in Helion failed: ValueError: no such layout" in page

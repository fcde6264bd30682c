"""The tables of the backward next to its rivals."""

import json
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.values.errors import UsageError
from tools.pages.recorded.backward_peer_tables import block

SHAPE = {
    "batch": 1, "num_heads": 16, "num_heads_kv": 2, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 128,
    "head_dim_v": 128, "causal": "lower_right", "direction": "backward", "dtype": "bfloat16",
}  # fmt: skip
ORDERED = SHAPE | {"features": "deterministic", "num_heads_kv": 16}
DOCUMENT = {
    "format": "blocktune-backward-peers", "schema": 1, "device": "Made-up GPU",
    "created_at": "2026-01-02T03:04:05+00:00",
    "environment": {"torch": "2.0", "triton": "3.0"},
}  # fmt: skip


def document(*rows: dict[str, Any]) -> dict[str, Any]:
    return DOCUMENT | {"rows": [{"commit": "a" * 40} | row for row in rows]}


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_the_default_number_of_parts_meets_the_faster_peer(tmp_path: Path) -> None:
    times = {"parts 1": 1000.0, "parts 4": 400.0, "cuDNN": 450.0, "flash-attn-4": 390.0}
    text = block(write(tmp_path / "x.backward-peers.json", document({"shape": SHAPE, "time_us": times})))
    assert "| 1,000.0 | 4 | 400.0 | 450.0 | 390.0 | 0.975 |" in text
    assert text.startswith("Measured without FlashAttention-3. Made-up GPU, 2026-01-02 (torch 2.0, triton 3.0)")
    assert "Commit aaaaaaaaaa" in text


def test_a_fixed_order_meets_any_order_of_its_run(tmp_path: Path) -> None:
    text = block(
        write(
            tmp_path / "x.backward-peers.json",
            document(
                {"shape": ORDERED, "time_us": {"flash-attn-4": 110.0}},
                {"shape": ORDERED, "time_us": {"default": 120.0, "in any order": 100.0}},
            ),
        )
    )
    assert "| 120.0 | 100.0 | 20% | 110.0 |" in text


def test_scores_that_run_ahead_meet_those_that_do_not(tmp_path: Path) -> None:
    times = {"default": 100.0, "scores not ahead": 110.0, "cuDNN": 120.0}
    text = block(write(tmp_path / "x.backward-peers.json", document({"shape": SHAPE, "time_us": times})))
    assert "| 110.0 | 100.0 | 1.100 | 120.0 | - | 1.200 |" in text
    assert "whole groups" not in text


def test_a_shape_meets_the_faster_peer(tmp_path: Path) -> None:
    times = {"default": 100.0, "flash-attn-4": 104.0, "cuDNN": 120.0}
    text = block(write(tmp_path / "x.backward-peers.json", document({"shape": SHAPE, "time_us": times})))
    assert "| 100.0 | 120.0 | 104.0 | 1.040 |" in text


def test_a_block_mask_is_counted_by_the_pairs_that_take_part(tmp_path: Path) -> None:
    shape = SHAPE | {"features": "block_sparse"}
    times = {"default": 50.0, "dense": 160.0, "flash_bwd_sparse": 150.0, "in a fixed order": 55.0, "flash-attn-4": 60.0}
    row = {"shape": shape, "time_us": times, "share": 0.25}
    text = block(write(tmp_path / "x.backward-peers.json", document(row)))
    assert "| 25.0% | 50.0 | 55.0 | 150.0 | 60.0 | 160.0 | 0.80 | 1.20 |" in text


def test_a_missing_file_says_so_and_another_kind_is_refused(tmp_path: Path) -> None:
    assert "not measured" in block(tmp_path / "x.backward-peers.json")
    with pytest.raises(UsageError):
        block(write(tmp_path / "x.backward-peers.json", DOCUMENT | {"format": "another"}))

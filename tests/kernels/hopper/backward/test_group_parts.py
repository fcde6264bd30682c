"""The number of parts in which groups are walked along by default, against what was measured."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.kernels.hopper.backward.kernel import FlashBackwardHopper
from blocktune.kernels.hopper.backward.layout import BLOCK_M, BLOCK_N
from blocktune.kernels.hopper.backward.parts import (
    MULTIPROCESSORS,
    _steps,
    _tiles,
    _walks,
    default_parts,
    heads_per_group,
)
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.reference import visible
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction

pytestmark = pytest.mark.triton_free

CHOICES = FlashBackwardHopper.parameters["group_parts"]
MEASURED = json.loads((Path(__file__).parents[4] / "results" / "h200.group-parts.json").read_text(encoding="utf-8"))[
    "rows"
]


def shape(num_heads: int, num_heads_kv: int, **changes: Any) -> AttentionShape:
    sizes = {"batch": 1, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 128, "head_dim_v": 128}
    heads = {"num_heads": num_heads, "num_heads_kv": num_heads_kv, "direction": Direction.BACKWARD}
    return AttentionShape(**sizes | heads | changes)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: AttentionShape.from_json(row["shape"]).label)
def test_the_default_is_within_two_percent_of_the_best_measured(row: dict[str, Any]) -> None:
    times = {int(parts): time_us for parts, time_us in row["time_us"].items()}
    chosen = default_parts(AttentionShape.from_json(row["shape"]), tuple(times))
    assert times[chosen] <= 1.02 * min(times.values())


def test_wide_heads_of_few_tiles_are_parted() -> None:
    asked = shape(128, 8, seqlen_q=1191, seqlen_k=1191, head_dim=240, head_dim_v=240, causal=Causal.UPPER_LEFT)
    assert default_parts(asked, CHOICES) > 1


def test_groups_of_packed_sequences_are_parted() -> None:
    packed = shape(32, 2, batch=6, seqlen_q=1054, seqlen_k=1054, features=Features.parse("varlen"))
    assert default_parts(replace(packed, causal=Causal.LOWER_RIGHT), CHOICES) > 1


def test_all_heads_that_share_keys_may_be_one_part_each() -> None:
    assert default_parts(shape(28, 4, batch=2, causal=Causal.LOWER_RIGHT), CHOICES) == 7
    assert default_parts(shape(12, 12), CHOICES) == 1


@pytest.mark.parametrize(
    "whole",
    [
        shape(32, 4, features=Features.parse("varlen deterministic"), causal=Causal.LOWER_RIGHT),
        shape(32, 4, head_dim=192, head_dim_v=192, features=Features.parse("varlen"), causal=Causal.LOWER_RIGHT),
        shape(32, 4, head_dim=192, features=Features.parse("deterministic")),
        shape(32, 4, head_dim=192, batch=16, seqlen_q=16384, seqlen_k=16384),
        shape(32, 4, batch=64, seqlen_q=16384, seqlen_k=16384),
    ],
    ids=lambda whole: whole.label,
)
def test_ordered_and_many_tiles_stay_whole(whole: AttentionShape) -> None:
    assert default_parts(whole, CHOICES) == 1


@pytest.mark.parametrize("window", [None, (100, 20), (300, -1), (-1, 64)])
@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(700, 700), (300, 1000), (1000, 300)])
def test_walks_are_the_blocks_that_see_a_key(
    seqlen_q: int, seqlen_k: int, causal: Causal, window: tuple[int, int] | None
) -> None:
    if window is not None and causal is not Causal.NONE and window[1] != 0:
        window = (window[0], 0)
    words = "" if window is None else f"window={window[0]}:{window[1]}"
    asked = shape(4, 1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal, features=Features.parse(words))
    seen = visible(seqlen_q, seqlen_k, causal, torch.device("cpu"), window)
    for place, walk in enumerate(_walks(asked)):
        rows = seen[:, place * BLOCK_N : (place + 1) * BLOCK_N].any(1).nonzero()[:, 0].tolist()
        blocks = range(rows[0] // BLOCK_M, rows[-1] // BLOCK_M + 1) if rows else range(1)
        assert abs(walk - len(blocks)) <= 1, place


def test_more_heads_take_turns_in_a_fixed_order() -> None:
    """Eight narrow ones at least and two wide ones, 32 at most, and all where there are few. Under a diagonal none
    waits: 16 at most."""
    fixed = Features.parse("deterministic")
    assert heads_per_group(shape(16, 16, batch=4), 1) == 8
    assert heads_per_group(shape(16, 16, batch=4, features=fixed), 1) == 8
    assert heads_per_group(shape(16, 16, batch=4, seqlen_q=16384), 1) == 2
    assert heads_per_group(shape(16, 16, batch=4, seqlen_q=16384, features=fixed), 1) == 8
    assert heads_per_group(shape(16, 16, batch=4, head_dim=256, head_dim_v=256, features=fixed), 1) == 4
    assert heads_per_group(shape(16, 16, batch=4, seqlen_q=512, features=fixed), 1) == 32
    assert heads_per_group(shape(16, 16, batch=4, seqlen_q=1024, features=fixed), 1) == 16
    assert heads_per_group(shape(16, 16, batch=4, seqlen_q=256, features=fixed), 1) == 32  # 64 would fit
    assert heads_per_group(shape(8, 8, seqlen_q=16384, head_dim=256, head_dim_v=256, features=fixed), 1) == 2
    assert heads_per_group(shape(16, 4, features=fixed), 2) == 8
    for length, head_dim, heads in ((4096, 128, 8), (4096, 64, 8), (4096, 256, 4), (16384, 128, 2), (512, 64, 16)):
        sizes = {"seqlen_q": length, "head_dim": head_dim, "head_dim_v": head_dim}
        under_a_diagonal = shape(16, 16, batch=4, causal=Causal.LOWER_RIGHT, features=fixed, **sizes)
        assert heads_per_group(under_a_diagonal, 1) == heads


@pytest.mark.parametrize(
    ("heads", "changes", "size"),
    [
        (16, {"head_dim": 192}, 4),  # five fit, and would leave one head for the last group
        (12, {}, 6),  # eight fit
        (13, {"head_dim": 192}, 5),  # no number divides them: 5, 5, 3
        (64, {"head_dim": 96}, 8),  # ten fit
    ],
)
def test_no_group_of_heads_is_much_smaller_than_the_others(heads: int, changes: dict[str, int], size: int) -> None:
    """Else its tiles begin when the others are about to end: the launch takes up to a third longer."""
    asked = shape(heads, heads, causal=Causal.LOWER_RIGHT, **changes)
    assert heads_per_group(asked, 1) == size
    if heads % size == 0:
        assert _steps(asked, 1) < 1.11 * sum(_tiles(asked, 1)) / MULTIPROCESSORS

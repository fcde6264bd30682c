"""What the Hopper backward makes of a shape: its form, and which queries a block of keys walks along.

The device functions that decide this are plain arithmetic; here they run as Python, against masks written out.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blocktune.kernels.hopper.backward import bounds, tiles, turns
from blocktune.kernels.hopper.backward.arguments import KeyTile, Walk
from blocktune.kernels.hopper.backward.layout import (
    bounds_of,
    form_of,
    is_added_apart,
    keys_of_block,
    scale_arguments,
    width_of,
    width_v,
)
from blocktune.kernels.hopper.common import device_functions
from blocktune.kernels.hopper.common.sequences import SequenceBounds
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.reference import visible
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction

pytestmark = pytest.mark.triton_free

BLOCK_M = 64
NO, UPPER_LEFT, LOWER_RIGHT = Causal
LENGTHS = [(1, 1), (64, 128), (63, 65), (130, 127), (300, 300), (70, 500), (500, 70), (257, 129), (1, 400), (400, 1)]
WINDOWS = [None, (0, 0), (-1, 3), (3, -1), (40, 40), (0, 200), (300, 2), (130, 130)]


def shape(seqlen_q: int, seqlen_k: int, causal: Causal = NO, features: str = "", **changes: Any) -> AttentionShape:
    sizes = {"batch": 1, "num_heads": 1, "num_heads_kv": 1, "head_dim": 64, "head_dim_v": 64} | changes
    return AttentionShape(
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal, direction=Direction.BACKWARD,
        features=Features.parse(features), **sizes,
    )  # fmt: skip


@pytest.fixture
def as_python(monkeypatch: pytest.MonkeyPatch) -> None:
    language = SimpleNamespace(maximum=max, minimum=min, where=lambda chosen, yes, no: yes if chosen else no)
    for module in (bounds, device_functions, tiles, turns):
        monkeypatch.setattr(module, "gl", language)
    monkeypatch.setattr(tiles, "locate", device_functions.locate.fn)
    monkeypatch.setattr(tiles, "walks_back", bounds.walks_back.fn)


def options_of(problem: AttentionShape) -> SimpleNamespace:
    """The constants that follow from a shape."""
    return SimpleNamespace(**form_of(problem), BLOCK_M=BLOCK_M, BLOCK_N=keys_of_block(problem))


def options_with(*names: str) -> SimpleNamespace:
    """Constants of which these are set."""
    values = dict.fromkeys(form_of(shape(64, 64)), False) | dict.fromkeys(names, True)
    return SimpleNamespace(**values, BLOCK_M=BLOCK_M, BLOCK_N=128)


def tile_at(problem: AttentionShape, n: int, back: bool = False) -> KeyTile:
    """The tile of keys number n of a head."""
    right, left = bounds_of(problem)
    sequence = SequenceBounds(0, 0, problem.seqlen_q, problem.seqlen_k, right, left, 0)
    options = options_of(problem)
    found, seen = bounds.query_range.fn(n, sequence, back, options)
    return KeyTile(n, n * options.BLOCK_N, 0, 0, 0, sequence, found, seen)


def walk(problem: AttentionShape, n0: int) -> tuple[int, int, int, int, bool]:
    tile = tile_at(problem, n0 // keys_of_block(problem))
    found = tile.walk
    return found.first, found.low, found.high, found.end, tile.seen


def in_a_fixed_order(problem: AttentionShape) -> AttentionShape:
    return replace(problem, features=replace(problem.features, deterministic=True))


def directions(problem: AttentionShape) -> list[bool]:
    """Whether the walks of a head go back, if that differs from head to head."""
    return [False, True] if options_of(problem).BOTH_WAYS else [False]


def tiles_in_order(problem: AttentionShape, back: bool) -> list[int]:
    """The tiles of a head, in the order in which they are taken: of the first of two groups of one head, or the last
    one."""
    count, options = -(-problem.seqlen_k // keys_of_block(problem)), options_of(problem)
    numbers = range(count, 2 * count) if back else range(count)
    sizes = SimpleNamespace(head_group=1, batch_heads=2)
    found = [tiles.locate_keys.fn(number, count, sizes, options) for number in numbers]
    assert {head for _, head in found} == {int(back)}
    return [n for n, _ in found]


def seen_by(problem: AttentionShape) -> torch.Tensor:
    window = problem.features.window
    return visible(problem.seqlen_q, problem.seqlen_k, problem.causal, torch.device("cpu"), window)


def problems(head_dim: int) -> list[AttentionShape]:
    words = ["" if window is None else f"window={window[0]}:{window[1]}" for window in WINDOWS]
    return [
        shape(*lengths, causal, word, head_dim=head_dim, head_dim_v=head_dim)
        for lengths in LENGTHS
        for causal in Causal
        for word in words
    ]


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_walk_misses_nothing_and_masks_where_it_must(head_dim: int, as_python: None) -> None:
    for problem in problems(head_dim):
        if not options_of(problem).GENERAL:
            continue
        seen, block_n = seen_by(problem), keys_of_block(problem)
        for n0 in range(0, problem.seqlen_k, block_n):
            first, low, high, end, any_seen = walk(problem, n0)
            assert first % BLOCK_M == low % BLOCK_M == high % BLOCK_M == end % BLOCK_M == 0
            assert 0 <= first <= low <= high <= end <= -(-problem.seqlen_q // BLOCK_M) * BLOCK_M
            assert end > first  # the copies of K and V come with the first block of queries
            columns = seen[:, n0 : n0 + block_n]
            assert not columns[:first].any(), problem.label
            assert not columns[end:].any(), problem.label
            assert columns[low:high].all(), problem.label
            assert low == high or (n0 + block_n <= problem.seqlen_k and high <= problem.seqlen_q)
            if not any_seen:
                assert low == high or not columns.numel()
                assert not columns[first:end].any()


@pytest.mark.parametrize("head_dim", [64, 256])
def test_unmasked_walks_are_as_long_as_can_be(head_dim: int, as_python: None) -> None:
    for problem in problems(head_dim):
        if not options_of(problem).GENERAL:
            continue
        seen, block_n = seen_by(problem), keys_of_block(problem)
        for n0 in range(0, problem.seqlen_k - block_n + 1, block_n):
            first, low, high, end, any_seen = walk(problem, n0)
            columns = seen[:, n0 : n0 + block_n]
            whole = [m for m in range(0, problem.seqlen_q - BLOCK_M + 1, BLOCK_M) if columns[m : m + BLOCK_M].all()]
            assert [m for m in whole if not low <= m < high] == []
            if any_seen:
                walked = range(first, end, BLOCK_M)
                assert [
                    m for m in walked if not columns[m : m + BLOCK_M].any() and m + BLOCK_M <= problem.seqlen_q
                ] == []


@pytest.mark.parametrize("head_dim", [64, 256])
def test_turns_follow_the_tiles_that_add(head_dim: int, as_python: None) -> None:
    """Tiles in the order in which they are taken; each finds counted what it waits for, and no tile that adds zeros
    counts."""
    ordered = map(in_a_fixed_order, problems(head_dim))
    for problem, back in [(each, back) for each in ordered for back in directions(each)]:
        counted: dict[int, int] = {}
        for n in tiles_in_order(problem, back):
            tile = tile_at(problem, n, back)
            for m in range(tile.walk.first, tile.walk.end, BLOCK_M):
                turn = turns.turn_of.fn(tile, m, options_of(problem))
                assert turn == (counted.get(m, 0) if tile.seen else -1), problem.label
                if tile.seen:
                    counted[m] = counted.get(m, 0) + 1


@pytest.mark.parametrize("lengths", [(4096, 4096), (2048, 4096), (4096, 2048)])
@pytest.mark.parametrize("window", [None, (1024, 0), (512, 200)])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_tiles_that_begin_together_wait_in_one_step_alone(
    lengths: tuple[int, int], window: tuple[int, int] | None, head_dim: int, as_python: None
) -> None:
    """Whoever comes before a tile at a block of queries is there in the same step or earlier; under a diagonal, where
    equal lengths begin, as many steps earlier as the tile has blocks of queries on it, unless walks go back."""
    words = "deterministic" if window is None else f"deterministic window={window[0]}:{window[1]}"
    causal = LOWER_RIGHT if window is None else NO
    problem = shape(*lengths, causal, words, head_dim=head_dim, head_dim_v=head_dim)
    block_n, options = keys_of_block(problem), options_of(problem)
    for back in directions(problem):
        added_at: dict[tuple[int, int], int] = {}
        for n in tiles_in_order(problem, back):
            tile = tile_at(problem, n, back)
            for place in range(tile.walk.first, tile.walk.end, BLOCK_M) if tile.seen else ():
                m = bounds.block_at.fn(tile.walk, place, options)
                added_at[m, turns.turn_of.fn(tile, m, options)] = (place - tile.walk.first) // BLOCK_M
        begin_apart = lengths[0] == lengths[1] and (window is None or window[1] == 0) and not back
        ahead = block_n // BLOCK_M if begin_apart else 0
        assert min(at - added_at[m, turn - 1] for (m, turn), at in added_at.items() if turn) >= ahead


@pytest.mark.parametrize(
    ("words", "back", "goes_back"),
    [
        ("window=200:-1", False, False),
        ("window=200:-1 deterministic", False, True),
        ("window=-1:200 deterministic", False, False),
        ("window=-1:200 deterministic", True, True),
    ],
)
def test_a_walk_passes_every_block_once_and_no_mask_where_none_is_needed(
    words: str, back: bool, goes_back: bool, as_python: None
) -> None:
    problem = shape(700, 700, NO, words)
    options, found = options_of(problem), tile_at(problem, 1, back).walk
    places = range(found.first, found.end, BLOCK_M)
    blocks = [bounds.block_at.fn(found, place, options) for place in places]
    assert blocks == (list(reversed(places)) if goes_back else list(places))
    assert [bounds.block_before.fn(m, back, options) for m in blocks[1:]] == blocks[:-1]
    placed = bounds.place_walk.fn(found, options)
    whole = {bounds.block_at.fn(found, place, options) for place in range(placed.low, placed.high, BLOCK_M)}
    assert whole == set(range(found.low, found.high, BLOCK_M))


@pytest.mark.parametrize(("heads", "head_group", "back"), [(8, 4, 4), (8, 3, 6), (9, 3, 6), (4, 4, 4), (2, 4, 2)])
def test_the_last_of_several_groups_of_heads_walks_back(
    heads: int, head_group: int, back: int, as_python: None
) -> None:
    options = options_of(shape(512, 512, LOWER_RIGHT, "deterministic"))
    sizes = SimpleNamespace(head_group=head_group, batch_heads=heads)
    found = [bounds.walks_back.fn(head, sizes, options) for head in range(heads)]
    assert found == [head >= back for head in range(heads)]


MASKS = [("RIGHT",), ("LEFT",), ("RAGGED_K",), ("RAGGED_Q",), ("RIGHT", "RAGGED_Q"), ("LEFT", "RAGGED_K")]


@pytest.mark.parametrize("masks", MASKS, ids=str)
def test_walks_that_go_back_begin_where_others_end(masks: tuple[str, ...]) -> None:
    ahead, back = options_with("GENERAL", *masks), options_with("GENERAL", "ORDERED", "BACK", *masks)
    assert bounds.begins_with_masks(ahead) == bounds.ends_with_masks(back) == (masks != ("RAGGED_Q",))
    assert bounds.ends_with_masks(ahead) == bounds.begins_with_masks(back) == bool({"LEFT", "RAGGED_Q"} & {*masks})


@pytest.mark.parametrize("others", [(), ("RAGGED_K",), ("RAGGED_Q",), ("RAGGED_K", "RAGGED_Q")], ids=str)
def test_walks_of_both_directions_pass_one_loop_of_masks_twice(others: tuple[str, ...]) -> None:
    options = options_with("GENERAL", "ORDERED", "BOTH_WAYS", "RIGHT", *others)
    assert bounds.begins_with_masks(options)
    assert not bounds.ends_with_masks(options)
    assert (bounds.parts_of_walk(options), bounds.parts_of_walk(options_with("GENERAL"))) == (2, 1)


@pytest.mark.parametrize("lengths", [(256, 512), (1024, 384), (500, 700), (70, 300), (64, 128)])
def test_tiles_of_an_unmasked_walk_begin_apart(lengths: tuple[int, int], as_python: None) -> None:
    """Every tile passes every block once, begins with one of its own, and leaves masked blocks where they are."""
    problem = shape(*lengths)
    begins = []
    for n0 in range(0, lengths[1], 128):
        found = tile_at(problem, n0 // 128).walk
        places, low, high = range(found.first, found.end, BLOCK_M), found.low, found.high
        passed = [bounds.rotate.fn(found, place, n0, options_of(problem)) for place in places]
        assert sorted(passed) == list(places)
        assert all(at == place for at, place in zip(passed, places, strict=True) if not low <= place < high)
        begins += passed[:1] if low < high else []
    blocks = lengths[0] // BLOCK_M
    assert len(set(begins)) >= min(len(begins), -(-blocks // 2))


def test_eight_tiles_of_a_group_begin_together(as_python: None) -> None:
    options = options_of(shape(4096, 4096, head_dim=128, head_dim_v=128, num_heads=4))
    whole = Walk(0, 0, 4096, 4096, False, 0)
    begins = [bounds.rotate.fn(whole, 0, n0, options) for n0 in range(0, 4096, 128)]
    assert begins == [n0 // 1024 * 1024 for n0 in range(0, 4096, 128)]


@pytest.mark.parametrize("words", ["window=40:40", "deterministic", "block_sparse"])
def test_other_walks_begin_where_they_did(words: str) -> None:
    assert not options_of(shape(256, 256, features=words)).TOGETHER
    assert not options_of(shape(256, 256, LOWER_RIGHT)).TOGETHER


def test_an_empty_sequence_makes_one_step(as_python: None) -> None:
    ends = "GENERAL", "PACKED", "RAGGED_K", "RAGGED_Q"
    for options in (options_with(*ends), options_with(*ends, "RIGHT", "LEFT", "LOWER_RIGHT")):
        found, _ = bounds.query_range.fn(0, SequenceBounds(0, 0, 0, 90, 90, 80, 0), False, options)
        assert (found.first, found.end) == (0, BLOCK_M)
        assert found.low == found.high == found.end  # masked


ENDS = "RAGGED_K", "RAGGED_Q"


@pytest.mark.parametrize(
    ("problem", "names"),
    [
        (shape(128, 256), []),
        (shape(640, 640, LOWER_RIGHT, head_dim=128, head_dim_v=128), ["CAUSAL"]),
        (shape(512, 512, LOWER_RIGHT, head_dim=128, head_dim_v=128), ["CAUSAL", "SHORT"]),
        (shape(512, 512, LOWER_RIGHT, head_dim=128, head_dim_v=128, num_heads=4), ["CAUSAL"]),
        (shape(576, 576, LOWER_RIGHT, head_dim=128, head_dim_v=128), ["CAUSAL", "GENERAL", "RIGHT", "RAGGED_K"]),
        (
            shape(500, 500, UPPER_LEFT, head_dim=128, head_dim_v=128),
            ["CAUSAL", "GENERAL", "RIGHT", *ENDS, "SHORT"],
        ),
        (shape(500, 512, head_dim=128, head_dim_v=128, features="softcap"), ["GENERAL", "SOFTCAP", "RAGGED_Q"]),
        (shape(128, 256, LOWER_RIGHT), ["CAUSAL", "GENERAL", "RIGHT"]),
        (shape(100, 256), ["GENERAL", "RAGGED_Q"]),
        (shape(256, 100), ["GENERAL", "RAGGED_K"]),
        (shape(256, 256, head_dim=96, head_dim_v=128), ["GENERAL", "SHORT"]),
        (shape(256, 320, head_dim=256, head_dim_v=256), ["GENERAL"]),
        (shape(256, 320), ["GENERAL", "RAGGED_K"]),
        (shape(256, 256, features="window=-1:5"), ["GENERAL", "RIGHT"]),
        (shape(256, 256, features="window=5:-1"), ["GENERAL", "LEFT", "SHORT"]),
        (shape(256, 256, UPPER_LEFT, features="window=5:5"), ["CAUSAL", "GENERAL", "RIGHT", "LEFT", "SHORT"]),
        (shape(256, 256, features="softcap deterministic"), ["GENERAL", "SOFTCAP", "ORDERED", "BACK"]),
        (shape(256, 256, UPPER_LEFT, features="deterministic"), ["CAUSAL", "GENERAL", "RIGHT", "ORDERED", "BOTH_WAYS"]),
        (shape(256, 256, features="window=5:9 deterministic"), ["GENERAL", "RIGHT", "LEFT", "ORDERED"]),
        (shape(256, 256, features="varlen"), ["GENERAL", "PACKED", *ENDS]),
        (shape(256, 256, UPPER_LEFT, features="varlen"), ["CAUSAL", "GENERAL", "PACKED", *ENDS, "RIGHT"]),
        (
            shape(256, 256, LOWER_RIGHT, features="varlen"),
            ["CAUSAL", "GENERAL", "PACKED", *ENDS, "RIGHT", "LOWER_RIGHT"],
        ),
        (
            shape(256, 256, features="varlen window=5:-1"),
            ["GENERAL", "PACKED", *ENDS, "LEFT", "LOWER_RIGHT", "SHORT"],
        ),
        (shape(256, 256, features="additive"), ["GENERAL", "MASK_AHEAD"]),
        (shape(256, 256, features="additive dropout"), ["GENERAL", "DROPOUT"]),
    ],
    ids=lambda value: value.label if isinstance(value, AttentionShape) else "",
)
def test_forms(problem: AttentionShape, names: list[str]) -> None:
    switches = {name: value for name, value in form_of(problem).items() if isinstance(value, bool)}
    assert {name for name, value in switches.items() if value and name != "DEFER"} == {*names}


def test_tiles_that_begin_together() -> None:
    sizes = {"head_dim": 128, "head_dim_v": 128}
    assert form_of(shape(512, 512, **sizes))["TOGETHER"] == 1
    assert form_of(shape(512, 512, num_heads=4, **sizes))["TOGETHER"] == 8
    assert form_of(shape(512, 512, num_heads=4))["TOGETHER"] == 1
    assert form_of(shape(512, 512, LOWER_RIGHT, num_heads=4, **sizes))["TOGETHER"] == 0


def test_widths_and_blocks() -> None:
    found = [width_of(shape(64, 64, head_dim=dim, head_dim_v=64)) for dim in (40, 64, 72, 88, 104, 136, 200, 256)]
    assert found == [64, 64, 80, 96, 128, 192, 256, 256]
    assert width_of(shape(64, 64, head_dim=64, head_dim_v=128)) == 128
    pairs = {(192, 128): (192, 128), (64, 256): (192, 256), (256, 40): (256, 128), (64, 128): (128, 128)}
    for (dim, dim_v), columns in pairs.items():
        asked = shape(64, 64, head_dim=dim, head_dim_v=dim_v)
        assert (width_of(asked), width_v(asked)) == columns
    assert keys_of_block(shape(64, 64)) == 128
    assert keys_of_block(shape(64, 64, head_dim=256)) == 64


@pytest.mark.parametrize(
    ("causal", "changes", "keys"),
    [
        (LOWER_RIGHT, {"num_heads": 133, "num_heads_kv": 133}, 64),
        (LOWER_RIGHT, {"num_heads": 134, "num_heads_kv": 134}, 128),
        (NO, {"num_heads": 66, "num_heads_kv": 66}, 64),
        (NO, {}, 128),
        (NO, {"head_dim_v": 192}, 64),
        (NO, {"features": "deterministic"}, 64),
        (NO, {"features": "softcap"}, 64),
    ],
)
def test_each_warpgroup_owns_half_of_128_keys_where_that_is_faster(
    causal: Causal, changes: dict[str, Any], keys: int
) -> None:
    sizes = {"num_heads": 67, "num_heads_kv": 67, "head_dim": 192, "head_dim_v": 128}
    assert keys_of_block(shape(64, 64, causal, **sizes | changes)) == keys


def test_a_soft_cap_goes_into_two_factors() -> None:
    log2_e = 1.4426950408889634
    assert scale_arguments(shape(64, 64), 0.5, Extras()) == (0.5, 0.5 * log2_e, None)
    assert scale_arguments(shape(64, 64), 0.0, Extras())[1] == pytest.approx(1e-30 * log2_e)
    capped = scale_arguments(shape(64, 64, features="softcap"), 0.5, Extras(softcap=20.0))
    assert capped == pytest.approx((0.5, 20.0 * log2_e, 0.5 / 20.0))


@pytest.mark.parametrize(
    ("head_dim", "causal", "features", "apart"),
    [
        (64, NO, "", True), (64, NO, "softcap", False), (64, NO, "varlen", False), (64, LOWER_RIGHT, "", False),
        (64, NO, "window=100:40", False), (64, LOWER_RIGHT, "deterministic", True), (128, NO, "", False),
        (128, NO, "deterministic", True), (256, NO, "deterministic", False),
    ],
)  # fmt: skip
def test_warps_of_their_own_add_dq(head_dim: int, causal: Causal, features: str, apart: bool) -> None:
    """At 64 columns in the plain form without a diagonal, and in a fixed order; of wider heads another kernel does."""
    problem = shape(256, 256, causal, features, head_dim=head_dim, head_dim_v=head_dim)
    assert is_added_apart(problem, persistent=True) == apart
    assert is_added_apart(problem, persistent=False) == (apart and "deterministic" in features)

"""Spans of tiles and visits under windows, against the mask itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.kernels.values.visible_ranges import count_rows, rows_in, whole_key_tiles
from blocktune.tuner.traffic.visited_tiles import visits_of

pytestmark = pytest.mark.triton_free


def shape(queries: int, keys: int, causal: Causal, window: tuple[int, int] | None) -> AttentionShape:
    return AttentionShape(
        batch=1,
        num_heads=1,
        num_heads_kv=1,
        seqlen_q=queries,
        seqlen_k=keys,
        head_dim=64,
        head_dim_v=64,
        causal=causal,
        features=Features(window=window),
    )


def seen(problem: AttentionShape) -> np.ndarray:
    """[seqlen_q, seqlen_k], pair by pair."""
    rows, columns = np.arange(problem.seqlen_q)[:, None], np.arange(problem.seqlen_k)[None, :]
    distance = columns - rows - problem.diagonal
    visible = np.ones(distance.shape, bool)
    left, right = problem.features.window or (-1, -1)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    return visible & (distance <= 0) if problem.causal is not Causal.NONE else visible


LENGTHS = st.integers(1, 200)
WINDOWS = st.sampled_from([(0, 0), (40, 0), (13, 30), (-1, 20), (20, -1), (150, 150)])


@settings(max_examples=80, deadline=None)
@given(st.builds(shape, LENGTHS, LENGTHS, st.sampled_from(Causal), WINDOWS), st.sampled_from([16, 64]))
def test_tiles_without_any_mask_are_counted_where_they_are(problem: AttentionShape, block: int) -> None:
    visible = seen(problem)
    for number, whole in enumerate(whole_key_tiles(problem, block, block)):
        rows = visible[number * block : (number + 1) * block]
        found = sum(
            bool(rows[:, start : start + block].all()) for start in range(0, problem.seqlen_k - block + 1, block)
        )
        assert whole == found


@settings(max_examples=80, deadline=None)
@given(st.builds(shape, LENGTHS, LENGTHS, st.sampled_from(Causal), WINDOWS), st.sampled_from([16, 64]))
def test_a_window_leaves_few_visits(problem: AttentionShape, block: int) -> None:
    visible = seen(problem)
    visits = visits_of(problem, block, block)
    counts = []
    for start in range(0, problem.seqlen_q, block):
        rows = visible[start : start + block]
        tiles = [rows[:, first : first + block].any() for first in range(0, problem.seqlen_k, block)]
        counts.append(max(1, sum(tiles)))
    # a last tile that no query sees may be loaded where the window ends beyond the keys
    assert 0 <= visits.total - sum(counts) <= len(counts)
    assert visits.query_tiles == len(counts)
    assert visits.longest == max(counts)
    assert 0 <= visits.masked <= visits.total


def test_a_window_of_a_long_sequence_is_a_band() -> None:
    visits = visits_of(shape(4096, 4096, Causal.NONE, (1023, 0)), 128, 64)
    whole = visits_of(shape(4096, 4096, Causal.NONE, None), 128, 64)
    # 1024 keys back and 128 of the tile itself: 18 tiles, of which the two at the diagonal and two at the left are cut
    assert (visits.longest, whole.longest) == (18, 64)
    assert visits.total == sum(min(2 * (tile + 1), 18) for tile in range(32))
    assert visits.masked == 32 * 2 + 24 * 2


@pytest.mark.parametrize(
    ("spans", "total", "covered"),
    [
        ((), 0, 0),
        ((range(0, 10), range(5, 15), range(0)), 20, 15),
        ((range(30, 40), range(0, 10), range(5, 8)), 23, 20),
    ],
)
def test_rows_are_counted_with_and_without_repetition(spans: tuple[range, ...], total: int, covered: int) -> None:
    assert (rows_in(spans), count_rows(spans)) == (total, covered)

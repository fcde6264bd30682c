"""How demands of several units overlap."""

import pytest

from blocktune.tuner.cost import queueing
from blocktune.tuner.cost.queueing import iteration_cycles

pytestmark = pytest.mark.triton_free


def test_one_strand_overlaps_nothing() -> None:
    assert iteration_cycles(100.0, (60.0, 40.0), 25.0, 1) == pytest.approx(225.0)


def test_many_strands_take_as_long_as_the_busiest_unit() -> None:
    assert iteration_cycles(100.0, (60.0, 40.0), 25.0, 200) == pytest.approx(100.0, rel=0.01)


def test_two_equal_units_follow_the_known_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    # Closed network of two equal stations: n strands finish n / (n + 1) rounds in the time of one visit.
    monkeypatch.setattr(queueing, "QUEUEING", 1.0)  # of random service times
    for strands in range(1, 9):
        assert iteration_cycles(100.0, (100.0,), 0.0, strands) == pytest.approx(100.0 * (strands + 1) / strands)


def test_regular_times_wait_less_than_random_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    regular = iteration_cycles(100.0, (100.0,), 0.0, 2)
    monkeypatch.setattr(queueing, "QUEUEING", 1.0)
    assert 100.0 < regular < iteration_cycles(100.0, (100.0,), 0.0, 2)


def test_more_strands_are_never_slower() -> None:
    times = [iteration_cycles(100.0, (120.0, 50.0), 80.0, 1 + half / 2) for half in range(12)]
    assert times == sorted(times, reverse=True)


def test_half_a_strand_lies_in_the_middle() -> None:
    one, two = (iteration_cycles(100.0, (80.0,), 30.0, strands) for strands in (1, 2))
    assert iteration_cycles(100.0, (80.0,), 30.0, 1.5) == pytest.approx((one + two) / 2)


def test_a_product_beside_the_softmax_hides_the_shorter_of_them() -> None:
    assert iteration_cycles(100.0, (30.0,), 10.0, 1, products_overlap=True) == pytest.approx(50.0 + 50.0 + 10.0)
    assert iteration_cycles(100.0, (90.0,), 10.0, 1, products_overlap=True) == pytest.approx(50.0 + 90.0 + 10.0)

"""The bound lets through what rounding explains, and nothing else."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tools.differential.truth.bounds import Comparison, compare_errors

TRUTH = torch.linspace(-2.0, 2.0, 64, dtype=torch.float64).view(1, 1, 8, 8)
NAN, INF = float("nan"), float("inf")


def judged(ours: Tensor, name: str = "out", theirs: Tensor = TRUTH, truth: Tensor = TRUTH, **more: Any) -> Comparison:
    options: dict[str, Any] = {"poisoned": False} | more
    return compare_errors(name, ours, truth, theirs, TRUTH.abs(), torch.zeros(1, 1, 8, 1), torch.float16, **options)


def changed(value: float, row: int = 3, base: Tensor = TRUTH) -> Tensor:
    tensor = base.clone()
    tensor[0, 0, row, 0] = value
    return tensor


def test_rounding_to_the_type_is_let_through() -> None:
    assert judged(TRUTH.half()).is_right
    assert 0.0 < judged(TRUTH.half()).ratio < 0.5


def test_three_times_pytorchs_error_is_let_through_and_no_more() -> None:
    own = TRUTH[0, 0, 3, 0].item()
    theirs = changed(own + 0.1)
    assert judged(changed(own + 0.299), theirs=theirs).is_right
    assert not judged(changed(own + 0.31), theirs=theirs).is_right
    assert not judged(changed(own + 0.31)).is_right


def test_float32_scores_may_be_large() -> None:
    options = {"truth": TRUTH, "theirs": TRUTH, "magnitude": TRUTH.abs(), "dtype": torch.float16, "poisoned": False}
    wrong = changed(TRUTH[0, 0, 3, 0].item() * 1.02)
    assert not compare_errors("out", wrong, score_size=torch.full((1, 1, 8, 1), 10.0), **options).is_right
    assert compare_errors("out", wrong, score_size=torch.full((1, 1, 8, 1), 1e6), **options).is_right


def test_a_gradient_is_as_wrong_as_the_exponential_of_a_score() -> None:
    options = {"truth": TRUTH, "theirs": TRUTH, "magnitude": TRUTH.abs(), "dtype": torch.float16, "poisoned": False}
    wrong, lost = changed(TRUTH[0, 0, 3, 0].item() * 5.0), changed(INF)
    for size, lets_wrong, lets_lost in ((2e6, False, False), (4e6, True, False), (1e8, True, True)):
        sizes = torch.full((1, 1, 8, 1), size)
        assert compare_errors("k", wrong, score_size=sizes, **options).is_right == lets_wrong
        assert compare_errors("k", lost, score_size=sizes, **options).is_right == lets_lost
        assert not compare_errors("out", lost, score_size=sizes, **options).is_right


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_lost_is_seen(value: float) -> None:
    found = judged(changed(value))
    assert (found.lost, found.is_right) == (1, False)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", ["out", "k"])
def test_rounding_over_the_largest_number_is_let_through(name: str, sign: float) -> None:
    """Three times PyTorch's error are 30, and 65520 is 20 away."""
    truth, theirs = changed(sign * 65500.0), changed(sign * 65490.0)
    found = judged(changed(sign * INF), name, theirs, truth)
    assert (found.lost, found.error, found.is_right) == (0, 20.0, True)
    assert found.ratio == pytest.approx(20.0 / 30.0, rel=1e-3)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_infinities_far_from_the_largest_number_are_lost(value: float) -> None:
    far, near = changed(65480.0), changed(65500.0)
    found = judged(changed(value), truth=far, theirs=changed(65470.0))
    assert (found.lost, found.is_right) == (1, False)
    found = judged(changed(value), truth=near, theirs=near)
    assert (found.lost, found.is_right) == (1, False)
    if value != INF:
        assert judged(changed(value), truth=near, theirs=changed(65490.0)).lost == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_edge_is_the_least_number_that_rounds_to_infinity(dtype: torch.dtype) -> None:
    largest = torch.tensor([torch.finfo(dtype).max], dtype=torch.float64)
    far = largest * 0.9
    found = compare_errors("k", largest * INF, largest, far, largest * 0, largest * 0, dtype, poisoned=False)
    edge = largest + found.error
    assert edge.to(dtype).isinf().all()
    assert (largest + found.error * 0.999).to(dtype).isfinite().all()


def test_a_number_in_the_place_of_none_is_seen_in_the_output() -> None:
    none = changed(NAN)
    found = judged(TRUTH, truth=none, theirs=none, poisoned=True)
    assert (found.swallowed, found.is_right) == (1, False)
    assert judged(changed(INF), truth=none, theirs=none, poisoned=True).is_right
    assert judged(TRUTH, name="k", truth=none, theirs=none, poisoned=True).is_right


def test_an_overflow_of_pytorch_excuses_gradients_and_no_output() -> None:
    theirs = changed(INF)
    assert judged(changed(NAN), name="q", theirs=theirs).is_right
    assert not judged(changed(NAN), theirs=theirs, wider=TRUTH.half()).is_right
    assert not judged(changed(0.0), theirs=theirs, wider=TRUTH.half()).is_right
    assert judged(TRUTH.half(), theirs=theirs, wider=TRUTH.half()).is_right


def test_a_hidden_number_that_is_none_may_come_through_or_not() -> None:
    theirs = changed(NAN)
    assert judged(changed(NAN), theirs=theirs, poisoned=True).is_right
    assert judged(TRUTH.half(), theirs=theirs, poisoned=True).is_right
    assert not judged(changed(0.0), theirs=theirs, poisoned=True).is_right
    assert not judged(changed(NAN), poisoned=True).is_right


def test_no_error_is_right_by_any_bound() -> None:
    zeros, endless = torch.zeros(3), torch.full((3,), float("inf"))
    found = compare_errors("a", zeros, zeros.double(), zeros, endless.double(), endless, torch.float16, poisoned=False)
    assert found.is_right


def test_an_empty_tensor_is_right() -> None:
    empty = TRUTH[:, :, :0]
    assert compare_errors("out", empty, empty, empty, empty, empty, torch.float16, poisoned=False).is_right

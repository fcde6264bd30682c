"""The bound lets through what rounding explains, and nothing else."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.differential.bounds import Comparison, compared

TRUTH = torch.linspace(-2.0, 2.0, 64, dtype=torch.float64).view(1, 1, 8, 8)
NAN, INF = float("nan"), float("inf")


def judged(ours: Tensor, name: str = "out", theirs: Tensor = TRUTH, truth: Tensor = TRUTH, **more: Any) -> Comparison:
    options: dict[str, Any] = {"poisoned": False} | more
    return compared(name, ours, truth, theirs, TRUTH.abs(), torch.zeros(1, 1, 8, 1), torch.float16, **options)


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
    assert not compared("out", wrong, score_size=torch.full((1, 1, 8, 1), 10.0), **options).is_right
    assert compared("out", wrong, score_size=torch.full((1, 1, 8, 1), 1e6), **options).is_right


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_lost_is_seen(value: float) -> None:
    found = judged(changed(value))
    assert (found.lost, found.is_right) == (1, False)


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


def test_an_empty_tensor_is_right() -> None:
    empty = TRUTH[:, :, :0]
    assert compared("out", empty, empty, empty, empty, empty, torch.float16, poisoned=False).is_right

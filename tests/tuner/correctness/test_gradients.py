"""The question of a backward: right gradients pass, wrong ones are told apart, and the reference is autograd's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.tuner.correctness.backward import GradientQuestion, make_gradient_questions
from blocktune.tuner.correctness.checks_of_shape import questions_of
from blocktune.tuner.correctness.head_groups import chosen_groups

pytestmark = pytest.mark.triton_free

SHAPE = AttentionShape(
    batch=2,
    num_heads=4,
    num_heads_kv=2,
    seqlen_q=96,
    seqlen_k=160,
    head_dim=32,
    head_dim_v=16,
    dtype="float32",
    direction=Direction.BACKWARD,
)


def by_autograd(question: GradientQuestion, shape: AttentionShape) -> tuple[Any, ...]:
    inputs = [tensor.double().requires_grad_() for tensor in (question.q, question.k, question.v)]
    out, _ = attention_reference(*inputs, causal=shape.causal, dtype=torch.float64)
    return tuple(gradient.float() for gradient in torch.autograd.grad(out, inputs, question.dout.double()))


@pytest.mark.parametrize("causal", list(Causal))
def test_the_reference_is_that_of_autograd_in_float64(causal: Causal) -> None:
    shape = replace(SHAPE, causal=causal)
    for question in make_gradient_questions(shape, device="cpu", seed=1):
        assert question.problem(by_autograd(question, shape)) is None


@pytest.mark.parametrize(
    ("place", "spoil"),
    [
        ("dq in rows 0.. of batch 0, key head 0", lambda gradients: gradients[0][0, 0, :2].zero_()),
        ("dq in rows 64.. of batch 1, key head 1", lambda gradients: gradients[0][1, 3, 70:].zero_()),
        ("dk in rows 64.. of batch 1, key head 1", lambda gradients: gradients[1][1, 1, 64:100].mul_(1.01)),
        ("dv in rows 128.. of batch 0, key head 1", lambda gradients: gradients[2][0, 1, 128:].neg_()),
    ],
)
def test_a_wrong_tile_of_one_gradient_is_named(place: str, spoil: Callable[[Any], Any]) -> None:
    question, _ = make_gradient_questions(SHAPE, device="cpu", seed=2)
    gradients = by_autograd(question, SHAPE)
    spoil(gradients)
    assert f" of {place}; " in (question.problem(gradients) or "")


def test_what_a_launch_did_not_write_is_found() -> None:
    question, _ = make_gradient_questions(SHAPE, device="cpu", seed=3)
    result = question.new_result()
    question.poison(result)
    assert "values of dq are not finite" in (question.problem(result) or "")


def test_a_launch_gets_the_forwards_output_and_log_sum_exp() -> None:
    question, _ = make_gradient_questions(SHAPE, device="cpu", seed=4)
    out, lse = attention_reference(question.q, question.k, question.v)
    torch.testing.assert_close(question.out, out)
    torch.testing.assert_close(question.lse, lse)
    given: list[Any] = []
    result = question.new_result()
    question.thunk(lambda *arguments: given.extend(arguments), result)()
    assert given[6:9] == list(result)
    assert given[9] == pytest.approx(SHAPE.head_dim**-0.5)


def test_groups_are_distinct_and_hold_the_first_and_the_last() -> None:
    groups = chosen_groups(SHAPE, 0)
    assert groups[:2] == (0, 3)
    assert sorted(groups) == [0, 1, 2, 3]
    large = replace(SHAPE, seqlen_q=1 << 15, seqlen_k=1 << 15, num_heads=64, num_heads_kv=64, head_dim=128)
    assert len(chosen_groups(large, 0)) == 2


def test_a_backward_shape_asks_for_gradients() -> None:
    plain, _ = questions_of(SHAPE, device="cpu", seed=5)
    assert isinstance(plain, GradientQuestion)

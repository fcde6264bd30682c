"""The check accepts what computes attention, in every data type and alignment, and finds what is wrong where it is."""

import dataclasses
from typing import Any

import pytest
import torch

from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.correctness import forward, memory
from tests.support.fakes.fake_kernels import SHAPE, attention

pytestmark = pytest.mark.triton_free


def outputs(shape: AttentionShape, question: forward.Question) -> tuple[Any, Any]:
    out = torch.empty(shape.batch, shape.num_heads, shape.seqlen_q, shape.head_dim_v, dtype=question.q.dtype)
    lse = torch.empty(out.shape[:3])
    attention(question.q, question.k, question.v, out, lse, forward.softmax_scale(shape), shape.causal)
    return out, lse


@pytest.mark.few(12)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize("lengths", [(80, 96), (130, 40), (1, 70)])
def test_attention_passes(dtype: str, causal: Causal, lengths: tuple[int, int]) -> None:
    shape = dataclasses.replace(SHAPE, dtype=dtype, causal=causal, seqlen_q=lengths[0], seqlen_k=lengths[1])
    for question in forward.make_questions(shape, device="cpu", seed=1):
        assert question.problem(*outputs(shape, question)) is None


@pytest.mark.parametrize("causal", list(Causal))
def test_a_chunked_reference_is_the_whole_one(causal: Causal, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dataclasses.replace(SHAPE, causal=causal, seqlen_q=300, seqlen_k=170)
    whole, _ = forward.make_questions(shape, device="cpu", seed=1)
    monkeypatch.setattr(forward, "CHUNK_SCORES", 64 * 170)
    assert len(list(forward._row_chunks(shape))) >= 5
    chunked, _ = forward.make_questions(shape, device="cpu", seed=1)
    torch.testing.assert_close(chunked._out, whole._out)
    torch.testing.assert_close(chunked._lse, whole._lse)


def test_one_wrong_row_is_found_and_named() -> None:
    shape = dataclasses.replace(SHAPE, dtype="bfloat16", seqlen_q=640)
    question, _ = forward.make_questions(shape, device="cpu", seed=1)
    out, lse = outputs(shape, question)
    out[0, 3, 200] *= 1.2
    problem = question.problem(out, lse)
    assert problem is not None
    assert "rows 192.. of batch 0, head 3" in problem


def test_what_is_not_finite_is_found_in_heads_without_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "REFERENCE_FLOPS", 0)
    shape = dataclasses.replace(SHAPE, num_heads=12)
    question, _ = forward.make_questions(shape, device="cpu", seed=1)
    out, lse = outputs(shape, question)
    unchecked = next(head for head in range(12) if head not in forward.chosen_heads(shape, 1))
    out[0, unchecked, 7, 7] = float("inf")
    assert question.problem(out, lse) == "1 of 15360 output values are not finite"


def test_the_log_sum_exp_is_checked() -> None:
    shape = dataclasses.replace(SHAPE, causal=Causal.LOWER_RIGHT, seqlen_q=96, seqlen_k=80)
    question, _ = forward.make_questions(shape, device="cpu", seed=1)
    out, lse = outputs(shape, question)
    assert "error 5.0" in str(question.problem(out, torch.where(torch.isneginf(lse), lse, lse + 0.5)))
    assert "-inf in other rows" in str(question.problem(out, lse.nan_to_num(neginf=-100.0)))
    assert question.problem(out) is None


def test_the_hard_question_overflows_a_softmax_without_a_running_maximum() -> None:
    """Otherwise it would not ask for what shortcuts around the maximum must survive."""
    for dtype, largest in (("bfloat16", torch.finfo(torch.bfloat16).max), ("float16", torch.finfo(torch.float16).max)):
        shape = dataclasses.replace(SHAPE, dtype=dtype, seqlen_q=256, seqlen_k=1024)
        plain, hard = forward.make_questions(shape, device="cpu", seed=1)
        for question, overflows in ((plain, False), (hard, True)):
            scores = question.q[0, 0].double() @ question.k[0, 0].double().T * forward.softmax_scale(shape)
            reference = scores[:, :64].amax(1, keepdim=True)
            assert bool((torch.exp(scores - reference) > largest).any()) is overflows


def test_heads_are_the_first_the_last_and_random_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dataclasses.replace(SHAPE, batch=5, num_heads=8)
    assert sorted(forward.chosen_heads(shape, 0)) == list(range(40))
    monkeypatch.setattr(forward, "REFERENCE_FLOPS", 0)
    assert forward.chosen_heads(shape, 0)[:2] == (0, 39)
    assert len(forward.chosen_heads(shape, 0)) == forward.MIN_HEADS
    assert forward.chosen_heads(shape, 0) != forward.chosen_heads(shape, 1)
    assert forward.chosen_heads(dataclasses.replace(SHAPE, batch=1, num_heads=1, num_heads_kv=1), 0) == (0,)


def test_required_memory_is_that_of_the_tensors_and_a_bounded_rest() -> None:
    shape = AttentionShape(
        batch=2, num_heads=32, num_heads_kv=32, seqlen_q=8192, seqlen_k=8192, head_dim=64, head_dim_v=64
    )
    assert shape.tensor_bytes < memory.required_bytes(shape) < shape.tensor_bytes + 5 * 2**30

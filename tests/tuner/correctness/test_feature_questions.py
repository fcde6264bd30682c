"""Questions of shapes with features: the definition's answers pass, what ignores the feature does not."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from blocktune.kernels.values.features import Features
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.torch_math import mathematics
from blocktune.tuner.correctness import feature_reference
from blocktune.tuner.correctness.backward import GradientQuestion
from blocktune.tuner.correctness.checks_of_shape import questions_of
from blocktune.tuner.correctness.features import FeatureQuestion, make_feature_questions
from blocktune.tuner.correctness.forward import softmax_scale
from blocktune.tuner.correctness.inputs import make_inputs

pytestmark = pytest.mark.triton_free

SHAPE = AttentionShape(
    batch=2,
    num_heads=4,
    num_heads_kv=2,
    seqlen_q=70,
    seqlen_k=90,
    head_dim=32,
    head_dim_v=16,
    dtype="float32",
)
DENSE = ("window=20:5", "softcap", "alibi", "boolean", "additive", "dropout", "window=9:0 softcap alibi dropout")
DECODE = ("cached", "cached page=16", "tree", "cached tree", "cached page=16 alibi window=30:0")


def shape_with(label: str, causal: Causal = Causal.NONE, **changes: Any) -> AttentionShape:
    return replace(SHAPE, causal=causal, features=Features.parse(label), **changes)


def by_definition(question: Any, shape: AttentionShape, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """What `kernels/values/reference.py` says of the whole tensors."""
    q, k, v = (tensor.to(dtype) for tensor in (question.q, question.k, question.v))
    features = replace(shape.features, deterministic=False)
    return attention_reference(
        q, k, v, causal=shape.causal, dtype=dtype, features=features, extras=question.inputs.extras
    )


@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize("label", [*DENSE, "varlen", "varlen window=20:3 alibi dropout softcap"])
def test_the_references_answer_passes(label: str, causal: Causal) -> None:
    shape = shape_with(label, causal)
    for question in questions_of(shape, device="cpu", seed=3):
        out, lse = by_definition(question, shape)
        assert question.problem(out.float(), lse.float()) is None


@pytest.mark.parametrize("label", [*DENSE, "block_sparse", "varlen"])
def test_what_ignores_the_feature_is_wrong(label: str) -> None:
    shape = shape_with(label, seqlen_q=256, seqlen_k=512)
    plain, _ = questions_of(shape, device="cpu", seed=3)
    out, _ = attention_reference(plain.q, plain.k, plain.v)
    assert "relative error" in (plain.problem(out) or "")


@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize("label", ["window=20:5", "dropout", "additive softcap"])
def test_chunks_of_rows_are_the_whole(label: str, causal: Causal, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_with(label, causal, seqlen_q=200)
    whole = feature_reference.Group(make_inputs(shape, device="cpu", seed=1), 3)
    right, gradients = whole.forward(), whole.gradients(torch.ones(2, 200, 16))
    monkeypatch.setattr(feature_reference, "CHUNK_SCORES", 1)
    assert len(list(whole.chunks())) == 4
    found = (*whole.forward(), *whole.gradients(torch.ones(2, 200, 16)))
    for part, expected in zip(found, (*right, *gradients), strict=True):
        torch.testing.assert_close(part, expected)


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
@pytest.mark.parametrize("label", DECODE)
def test_an_entry_of_a_cache_is_attention_over_its_own_keys(label: str, causal: Causal) -> None:
    """Entry by entry against the reference with a boolean mask for the tree, and keys gathered by hand."""
    shape = shape_with(label, causal, seqlen_q=9, batch=3)
    question, _ = make_feature_questions(shape, device="cpu", seed=5)
    inputs, extras = question.inputs, question.inputs.extras
    out, lse = question.new_result(), question.new_lse()
    for entry, length in enumerate(inputs.lengths_k):
        k, v = inputs.k[entry : entry + 1, :, :length], inputs.v[entry : entry + 1, :, :length]
        if extras.block_table is not None:
            places = [(int(extras.block_table[entry, key // 16]), key % 16) for key in range(length)]
            k, v = (torch.stack([pool[page, :, row] for page, row in places], 1)[None] for pool in (inputs.k, inputs.v))
        own, mask = [word for word in shape.features.label.split() if word.split("=")[0] in ("window", "alibi")], None
        if extras.tree_mask is not None:
            bits = [[int(word) >> bit & 1 for bit in range(9)] for word in extras.tree_mask[entry, :, 0]]
            mask = torch.ones(1, 1, 9, length, dtype=torch.bool)
            mask[0, 0, :, length - 9 :] = torch.tensor(bits, dtype=torch.bool)
            own.append("boolean")
        out[entry], lse[entry] = (
            part[0]
            for part in attention_reference(
                inputs.q[entry : entry + 1],
                k,
                v,
                causal=shape.causal,
                features=Features.parse(" ".join(own)),
                extras=replace(extras, mask=mask),
            )
        )
    assert question.problem(out, lse) is None
    assert "relative error" in (question.problem(out.roll(1, 0)) or "")


def test_block_sparse_is_a_boolean_mask_of_blocks() -> None:
    shape = shape_with("block_sparse", Causal.UPPER_LEFT, seqlen_q=300, seqlen_k=520)
    for question in questions_of(shape, device="cpu", seed=2):
        assert isinstance(question, FeatureQuestion)
        mask = question.inputs.extras.block_mask
        dense = mask.to_dense(300, 520)
        out, lse = attention_reference(
            question.q,
            question.k,
            question.v,
            causal=shape.causal,
            features=Features.parse("boolean"),
            extras=replace(question.inputs.extras, mask=dense),
        )
        assert question.problem(out, lse) is None
        assert mask.density == pytest.approx(0.2)  # one of five blocks
        assert question.flops == pytest.approx(0.2 * shape.flops, rel=1e-6)


@pytest.mark.few(8)
@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize("label", [*DENSE, "varlen", "deterministic", "varlen window=20:3 alibi dropout softcap"])
def test_gradients_are_those_of_autograd_in_float64(label: str, causal: Causal) -> None:
    shape = shape_with(label, causal, direction=Direction.BACKWARD)
    for question in questions_of(shape, device="cpu", seed=1):
        assert isinstance(question, GradientQuestion)
        inputs = [tensor.double().requires_grad_() for tensor in (question.q, question.k, question.v)]
        features = replace(shape.features, deterministic=False)
        out, lse = attention_reference(
            *inputs, causal=shape.causal, dtype=torch.float64, features=features, extras=question.inputs.extras
        )
        torch.testing.assert_close(question.lse, lse.detach().float(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(question.out, out.detach().float(), rtol=1e-3, atol=1e-4)
        gradients = torch.autograd.grad(out, inputs, question.dout.double())
        assert question.problem(tuple(gradient.float() for gradient in gradients)) is None


def test_a_launch_gets_the_extras_where_the_shape_has_features() -> None:
    shape = shape_with("softcap alibi")
    question, _ = questions_of(shape, device="cpu", seed=1)
    got: list[Any] = []
    result = question.new_result()
    question.thunk(lambda *arguments: got.extend(arguments), result)()
    assert got[3] is result
    assert got[4:6] == [None, softmax_scale(shape)]
    assert got[6].softcap == 30.0
    assert tuple(got[6].alibi_slopes.shape) == (1, 4)
    backward, _ = questions_of(replace(shape, direction=Direction.BACKWARD), device="cpu", seed=1)
    got.clear()
    backward.thunk(lambda *arguments: got.extend(arguments), backward.new_result())()
    assert len(got) == 11
    assert got[10].softcap == 30.0


def test_lengths_differ_and_flops_count_the_true_ones() -> None:
    shape = shape_with("varlen", batch=5)
    inputs = make_inputs(shape, device="cpu", seed=1)
    assert inputs.lengths_q[0] == 70
    assert all(35 <= length <= 70 for length in inputs.lengths_q)
    assert inputs.extras.cu_seqlens_q.tolist()[-1] == sum(inputs.lengths_q) == inputs.q.shape[2]  # type: ignore[union-attr]
    pairs = sum(rows * keys for rows, keys in zip(inputs.lengths_q, inputs.lengths_k, strict=True))
    assert inputs.flops == 2 * 48 * 4 * pairs
    assert inputs.key_bytes == sum(inputs.lengths_k) * 2 * 48 * 4


@pytest.mark.parametrize("label", ["cached kv=e4m3", "cached page=16 kv=int8", "cached token_scales page=16 kv=e4m3"])
def test_questions_over_8_bit_caches_ask_for_the_numbers_that_they_stand_for(label: str) -> None:
    shape = shape_with(label, causal=Causal.LOWER_RIGHT, dtype="float16", seqlen_q=5)
    for question in questions_of(shape, device="cpu", seed=3):
        assert isinstance(question, FeatureQuestion)
        extras = question.inputs.extras
        assert question.k.element_size() == question.v.element_size() == 1
        assert extras.scale_k is not None
        assert extras.scale_v is not None
        assert question.key_bytes == sum(question.inputs.lengths_k) * shape.num_heads_kv * (32 + 16)
        found = {"right": (1.0, 1.0), "without half of the scale of keys": (0.5, 1.0), "of values": (1.0, 0.5)}
        for name, (of_keys, of_values) in found.items():
            call = Call.of(
                causal=shape.causal,
                scale=softmax_scale(shape),
                cache_seqlens=extras.cache_seqlens,
                block_table=extras.block_table,
                page_size=shape.features.page_size,
                lengths=(2, 5, 90),
                scale_k=extras.scale_k * of_keys,
                scale_v=extras.scale_v * of_values,
            )
            problem = question.problem(*mathematics(question.q, question.k, question.v, call, lse=True))
            assert (problem is None) is (name == "right")

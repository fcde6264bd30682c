"""FlexAttention says our features in its own functions, and FlashAttention-4 is called as it wants to be."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.tuner.compare.fa4_peer import fa4_compute
from blocktune.tuner.compare.flex_peer import flex_compute
from blocktune.tuner.correctness.checks_of_shape import questions_of

SHAPE = AttentionShape(
    batch=2, num_heads=4, num_heads_kv=2, seqlen_q=128, seqlen_k=128, head_dim=32, head_dim_v=32, dtype="float32"
)
WORDS = ("", "window=20:9", "softcap", "alibi", "boolean", "additive", "block_sparse", "window=40:-1 softcap alibi")
# uncompiled it computes all scores, which it warns about
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # torch 2.11 warns of its own use of it
]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def problem_of(shape: AttentionShape, make: Any) -> str | None:
    question, _ = questions_of(shape, device="cuda" if torch.cuda.is_available() else "cpu", seed=0)
    compute = make(shape, question)
    return question.problem(compute(question.q, question.k, question.v))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.few(5)
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
@pytest.mark.parametrize("words", WORDS)
def test_flex_computes_the_features(words: str, causal: Causal) -> None:
    shape = replace(SHAPE, features=Features.parse(words), causal=causal)
    assert problem_of(shape, flex_compute) is None


@pytest.mark.gpu
@pytest.mark.parametrize("words", ["", "boolean softcap"])
def test_flex_computes_gradients(words: str) -> None:
    """Which it does on a GPU alone."""
    shape = replace(SHAPE, features=Features.parse(words), direction=Direction.BACKWARD, dtype="bfloat16", head_dim=64)
    assert problem_of(replace(shape, head_dim_v=64), flex_compute) is None


def test_flex_names_what_it_cannot_say() -> None:
    shape = replace(SHAPE, features=Features.parse("dropout"))
    with pytest.raises(UsageError, match="without dropout"):
        problem_of(shape, flex_compute)


def fake_fa4(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_func(q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool) -> Any:
        turned = (tensor.transpose(1, 2) for tensor in (q, k, v))
        mask = Causal.LOWER_RIGHT if causal else Causal.NONE
        out, lse = attention_reference(*turned, causal=mask, scale=softmax_scale)
        return out.transpose(1, 2), lse

    package, module = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
def test_fa4_is_called_in_its_own_layout(monkeypatch: pytest.MonkeyPatch, direction: Direction, causal: Causal) -> None:
    fake_fa4(monkeypatch)
    assert problem_of(replace(SHAPE, direction=direction, causal=causal), fa4_compute) is None


def test_fa4_that_is_not_installed_is_named() -> None:
    with pytest.raises(UsageError, match=r"flash_attn.cute must be importable"):
        problem_of(SHAPE, fa4_compute)


@pytest.mark.parametrize(
    "changes", [{"features": Features(softcap=True)}, {"causal": Causal.UPPER_LEFT, "seqlen_k": 256}]
)
def test_fa4_is_compared_on_plain_shapes(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="compared on plain shapes"):
        problem_of(replace(SHAPE, **changes), fa4_compute)

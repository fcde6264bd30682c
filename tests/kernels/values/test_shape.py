"""The shape of a call: what callers may write for it, and what a stored one has to hold."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import ELEMENT_BYTES, SHORT_DTYPES, AttentionShape, Causal, Direction

pytestmark = pytest.mark.triton_free

SIZES = {"batch": 2, "num_heads": 8, "seqlen_q": 128, "head_dim": 64}
FULL = AttentionShape(**SIZES, num_heads_kv=2, seqlen_k=256, head_dim_v=32)  # type: ignore[arg-type]


def shape(**changes: Any) -> AttentionShape:
    return AttentionShape(**SIZES | changes)


def test_sizes_that_are_not_given_are_as_those_of_the_queries() -> None:
    assert shape() == shape(num_heads_kv=8, seqlen_k=128, head_dim_v=64)
    assert (FULL.num_heads_kv, FULL.seqlen_k, FULL.head_dim_v) == (2, 256, 32)


@pytest.mark.parametrize("name", ELEMENT_BYTES)
def test_a_data_type_may_be_pytorch_s_or_a_name(name: str) -> None:
    forms = (name, SHORT_DTYPES[name], getattr(torch, name))
    assert {shape(dtype=form).dtype for form in forms} == {name}
    assert type(shape(dtype=getattr(torch, name)).dtype) is str


def test_causal_may_be_a_switch_or_a_name() -> None:
    assert shape(causal=True) == shape(causal="upper_left") == shape(causal=Causal.UPPER_LEFT)
    assert shape(causal=False) == shape()
    assert shape(causal="lower_right").causal is Causal.LOWER_RIGHT


def test_features_and_direction_may_be_names() -> None:
    assert shape(features="window=31:0 softcap") == shape(features=Features(window=(31, 0), softcap=True))
    assert shape(direction="backward").direction is Direction.BACKWARD


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"dtype": "fp4"}, "`dtype` must be one of float16, bfloat16, float32, float8_e4m3fn, but got 'fp4'"),
        ({"dtype": torch.int8}, "but got torch.int8"),
        ({"dtype": None}, "but got None"),
        ({"causal": "yes"}, "`causal` must be one of none, upper_left, lower_right, but got 'yes'"),
        ({"direction": "bwd"}, "`direction` must be one of forward, backward, but got 'bwd'"),
        ({"features": "colour"}, "but got 'colour'"),
        ({"seqlen_k": 0}, "`seqlen_k > 0` must hold"),
        ({"batch": True}, "`batch > 0` must hold, but got batch=True"),
        ({"num_heads_kv": 3}, "`num_heads % num_heads_kv == 0` must hold"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_breaks_a_rule_is_wrong_use_with_the_choices(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        shape(**given)
    assert reason in str(refused.value)


def test_a_shape_is_a_value() -> None:
    for other in (
        copy.copy(FULL),
        pickle.loads(pickle.dumps(FULL)),
        replace(FULL),
        AttentionShape.from_json(FULL.to_json()),
    ):
        assert (other, hash(other)) == (FULL, hash(FULL))
    assert replace(FULL, causal=True).causal is Causal.UPPER_LEFT  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        FULL.batch = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [{"dtype": "bf16"}, {"causal": True}, {"direction": "fwd"}, {"dtype": ["float16"]}, {"label": "b2"}],
    ids=str,
)
def test_a_stored_shape_holds_the_names_alone(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        AttentionShape.from_json(FULL.to_json() | change)


@pytest.mark.parametrize("name", ["num_heads_kv", "seqlen_k", "head_dim_v", "batch"])
def test_a_stored_shape_has_every_size(name: str) -> None:
    document = FULL.to_json()
    del document[name]
    with pytest.raises(UsageError, match=f"{name} is missing"):
        AttentionShape.from_json(document)

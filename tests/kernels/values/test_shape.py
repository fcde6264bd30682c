"""The shape of a call: what callers may write for it, and what a stored one has to hold."""

import copy
import itertools
import pickle
import time
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
    assert shape(causal="lower_right", seqlen_k=256).causal is Causal.LOWER_RIGHT


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
        ({"features": "colour"}, "No such feature: 'colour'"),
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


@pytest.mark.parametrize("document", [None, [], "b2 h32 s8192 d64 bf16"])
def test_a_stored_shape_is_an_object(document: Any) -> None:
    with pytest.raises(UsageError, match="must be an object"):
        AttentionShape.from_json(document)


@pytest.mark.parametrize("name", ["num_heads_kv", "seqlen_k", "head_dim_v", "batch"])
def test_a_stored_shape_has_every_size(name: str) -> None:
    document = FULL.to_json()
    del document[name]
    with pytest.raises(UsageError, match=f"{name} is missing"):
        AttentionShape.from_json(document)


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT, Causal.LOWER_RIGHT])
@pytest.mark.parametrize("window", [None, (0, 0), (5, 5), (-1, 3), (3, -1), (40, 0), (100, 100)])
def test_visible_pairs_are_counted_as_one_by_one(causal: Causal, window: tuple[int, int] | None) -> None:
    for seqlen_q, seqlen_k in itertools.product((1, 2, 7, 16, 33), repeat=2):
        lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        shape = AttentionShape(
            batch=1, num_heads=1, num_heads_kv=1, head_dim=64, head_dim_v=64, dtype="bfloat16", causal=causal,
            features=Features(window=window), **lengths
        )  # fmt: skip
        left, right = window or (-1, -1)
        count = 0
        for query, key in itertools.product(range(seqlen_q), range(seqlen_k)):
            distance = key - query - shape.diagonal
            count += not (
                (left >= 0 and distance < -left)
                or (right >= 0 and distance > right)
                or (causal is not Causal.NONE and distance > 0)
            )
        assert shape.visible_pairs == count


def test_pairs_of_the_longest_windows_are_counted_at_once() -> None:
    shape = AttentionShape(
        batch=1, num_heads=1, num_heads_kv=1, seqlen_q=2**31 - 1, seqlen_k=2**31 - 1, head_dim=64, head_dim_v=64,
        dtype="bfloat16", features=Features(window=(5, 5)),
    )  # fmt: skip
    began = time.thread_time()
    assert shape.visible_pairs == 11 * (2**31 - 1) - 30
    assert time.thread_time() - began < 1


def test_a_size_that_no_kernel_can_be_given_is_refused() -> None:
    with pytest.raises(UsageError, match="No such feature"):
        Features.parse("page=4294967296")
    with pytest.raises(UsageError, match="`seqlen_q <= 2147483647` must hold, but got a number of 64 bits"):
        shape(seqlen_q=2**63)

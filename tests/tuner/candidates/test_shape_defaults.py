"""Sizes that are not given follow the documented defaults; what cannot be meant is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import Causal
from blocktune.tuner.candidates.shape_defaults import complete_shape

pytestmark = pytest.mark.triton_free


def test_the_documented_defaults() -> None:
    shape = complete_shape(8192, 64)
    assert (shape.batch, shape.num_heads, shape.num_heads_kv) == (2, 32, 32)
    assert (shape.seqlen_q, shape.seqlen_k, shape.head_dim, shape.head_dim_v) == (8192, 8192, 64, 64)
    assert (shape.dtype, shape.causal) == ("bfloat16", Causal.NONE)


def test_what_is_given_is_kept() -> None:
    shape = complete_shape(
        100, 80, batch=3, heads=12, kv_heads=4, seq_k=70, dim_v=96, dtype="fp16", causal="lower-right"
    )
    assert shape.label == "b3 h12/4 s100/70 d80/96 fp16 causal-lower-right"
    assert complete_shape(128, 64, causal=True).causal is Causal.UPPER_LEFT


@given(st.integers(2, 1 << 20), st.integers(1, 1024), st.none() | st.integers(1, 64))
def test_every_size_gives_a_valid_shape(seq: int, dim: int, kv_heads: int | None) -> None:
    shape = complete_shape(seq, dim, kv_heads=kv_heads)
    assert shape.batch == max(1, 16384 // seq)
    assert shape.num_heads % shape.num_heads_kv == 0


def test_the_tokens_of_a_batch_are_the_keys_where_there_are_more_of_them() -> None:
    assert complete_shape(1, 128, seq_k=8192).batch == 2
    assert complete_shape(8192, 128, seq_k=1).batch == 2
    assert complete_shape(1, 128, seq_k=1).batch == 16384


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seq": 0, "dim": 64}, "seq=0"),
        ({"seq": 1, "dim": 64, "batch": 8}, "seq_k"),
        ({"seq": 64, "dim": -1}, "dim=-1"),
        ({"seq": 64, "dim": 64, "heads": 6, "kv_heads": 4}, "num_heads % num_heads_kv"),
        ({"seq": 64, "dim": 64, "kv_heads": 0}, "kv_heads=0"),
        ({"seq": 64, "dim": 64, "dtype": "int8"}, "int8"),
        ({"seq": 64, "dim": 64, "causal": "diagonal"}, "upper_left"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        complete_shape(**arguments)

"""The fewest bytes that any algorithm moves: no kernel of ours is below them, and a plain forward can reach them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import FP8, AttentionShape, Causal, Direction
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.traffic.by_kernel import traffic_of
from blocktune.tuner.traffic.least import least_bytes

pytestmark = pytest.mark.triton_free

LIMITS = device_named("h200").limits
FEATURES = ("", "window=40:9", "softcap", "boolean", "additive", "block_sparse", "dropout", "cached", "varlen", "alibi",
            "cached kv=int8", "cached token_scales kv=int8",
            "cached page=64", "tree cached", "deterministic", "window=0:-1 softcap",
            "varlen alibi dropout")  # fmt: skip
SHAPES = st.builds(
    lambda queries, keys, dims, causal, group, features, direction, dtype: AttentionShape(
        batch=2,
        num_heads=2 * group,
        num_heads_kv=2,
        seqlen_q=queries,
        seqlen_k=keys,
        head_dim=dims[0],
        head_dim_v=dims[1],
        dtype=dtype,
        causal=causal,
        features=Features.parse(features),
        direction=direction,
    ),
    st.integers(1, 8) | st.integers(1, 700),
    st.integers(1, 700),
    st.sampled_from([(64, 64), (128, 128), (80, 48)]),
    st.sampled_from(Causal),
    st.integers(1, 4),
    st.sampled_from(FEATURES),
    st.sampled_from(Direction),
    st.sampled_from(["bfloat16", "float32", FP8]),
)


@settings(max_examples=120, deadline=None)
@given(SHAPES)
def test_no_kernel_moves_less(shape: AttentionShape) -> None:
    for kernel in KERNELS.values():
        if kernel.unsupported(shape, LIMITS) is None:
            config = kernel.default_config(shape, LIMITS)
            moved = traffic_of(kernel, config, shape, perfect_l2=True).total_bytes
            assert least_bytes(shape) <= moved, kernel.name


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
def test_a_plain_forward_reaches_it_where_l2_keeps_every_key(causal: Causal) -> None:
    shape, kernel = complete_shape(4096, 64, causal=causal), KERNELS["flash_fwd"]
    once = traffic_of(kernel, kernel.default_config(shape, LIMITS), shape, perfect_l2=True)
    assert once.total_bytes == least_bytes(shape) == 4 * 4 * 32 * 4096 * 64 * 2


def test_what_no_query_sees_is_not_counted() -> None:
    decode = complete_shape(1, 128, batch=1, heads=8, seq_k=32768)
    window = replace(decode, features=Features(window=(1023, 0)))
    assert least_bytes(window) == 2 * 8 * 128 * 2 + 2 * 8 * 1024 * 128 * 2
    assert least_bytes(decode) > 30 * least_bytes(window)


def test_a_block_mask_needs_the_keys_of_its_blocks() -> None:
    shape = replace(
        complete_shape(128, 64, batch=1, heads=1, seq_k=1024), features=Features(mask=MaskKind.BLOCK_SPARSE)
    )
    assert least_bytes(shape) == 2 * 128 * 64 * 2 + 2 * 256 * 64 * 2


def test_a_backward_reads_the_gradient_and_writes_three() -> None:
    shape = replace(complete_shape(1024, 64, batch=1, heads=1), direction=Direction.BACKWARD)
    assert least_bytes(shape) == (4 + 3) * 1024 * 64 * 2

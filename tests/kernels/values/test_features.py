"""What a caller may ask for besides sizes: labels, JSON, refusals, and what a shape makes of a window."""

import time
from typing import Any

import pytest

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import NO_FEATURES, CacheType, Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal

pytestmark = pytest.mark.triton_free

LABELS = {
    "": Features(),
    "window=127:3": Features(window=(127, 3)),
    "window=-1:5": Features(window=(-1, 5)),
    "boolean": Features(mask=MaskKind.BOOLEAN),
    "window=4:4 additive softcap alibi dropout": Features(
        window=(4, 4), mask=MaskKind.ADDITIVE, softcap=True, alibi=True, dropout=True
    ),
    "block_sparse": Features(mask=MaskKind.BLOCK_SPARSE),
    "tree cached page=64": Features(mask=MaskKind.TREE, cached=True, page_size=64),
    "cached kv=e4m3": Features(cached=True, kv=CacheType.E4M3),
    "cached token_scales page=16 kv=int8": Features(cached=True, page_size=16, kv=CacheType.INT8, token_scales=True),
    "varlen deterministic": Features(varlen=True, deterministic=True),
}


def shape(**changes: Any) -> AttentionShape:
    sizes: dict[str, Any] = {"batch": 1, "num_heads": 2, "num_heads_kv": 2, "seqlen_q": 10, "seqlen_k": 16}
    return AttentionShape(**(sizes | {"head_dim": 16, "head_dim_v": 16} | changes))


@pytest.mark.parametrize(("label", "features"), LABELS.items())
def test_labels_are_canonical_and_read_back(label: str, features: Features) -> None:
    assert features.label == label
    assert Features.parse(label) == features
    assert bool(features) is bool(label)


@pytest.mark.parametrize(("label", "features"), LABELS.items())
def test_a_shape_travels_as_json_with_its_features(label: str, features: Features) -> None:
    long = shape(seqlen_q=200, seqlen_k=260, features=features)  # no side reaches past all of the keys
    document = long.to_json()
    assert document.get("features", "") == label
    assert ("features" in document) is bool(features)  # documents from before there were features stay as they are
    assert AttentionShape.from_json(document) == long
    assert label in long.label


def test_names_are_what_a_kernel_must_know() -> None:
    assert Features.parse("window=4:4 additive softcap cached page=16").names == {
        "window", "additive", "softcap", "cached", "paged"
    }  # fmt: skip
    assert Features.parse("cached token_scales kv=int8").names == {"cached", "token_scales", "kv=int8"}
    assert NO_FEATURES.names == frozenset()


def test_an_8_bit_cache_has_half_of_the_bytes() -> None:
    plain, short = (shape(features=Features.parse(label)) for label in ("cached", "cached kv=e4m3"))
    assert (plain.kv_bytes, short.kv_bytes) == (2, 1)
    assert plain.tensor_bytes - short.tensor_bytes == 2 * 16 * 32  # two heads of 16 keys and values of 16 numbers


def test_a_window_without_bounds_is_none() -> None:
    assert Features(window=(-1, -1)) == NO_FEATURES
    assert Features.parse("window=-1:-1").label == ""


@pytest.mark.parametrize("side", [2**31 - 1, 2**31, 2**63, 10**40])
def test_a_side_that_no_sequence_is_as_long_as_is_no_bound(side: int) -> None:
    assert Features(window=(side, side)) == Features.parse(f"window={side}:{side}") == NO_FEATURES
    assert Features.parse(f"window={side}:5") == Features(window=(-1, 5))


@pytest.mark.parametrize(
    "text",
    ["windows", "window=3", "window=a:b", "window=1:2:3", "page=x", "softcap=2", "sparse", "softcap=True", "kv=fp8"],
)
def test_words_that_are_no_feature_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="The features are window=LEFT:RIGHT, page=SIZE, softcap"):
        Features.parse(text)
    with pytest.raises(UsageError):
        AttentionShape.from_json(shape().to_json() | {"features": text})


@pytest.mark.parametrize("text", ["window=1:1 window=2:2", "boolean additive", "cached softcap cached"])
def test_a_feature_that_is_said_twice_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=rf"said once, .* but got '{text}'\. Leave {text.split()[-1]} out"):
        Features.parse(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": (-2, 0)}, r"`window` must be \(left, right\) in keys"),
        ({"window": (1,)}, r"but got \(1,\)"),
        ({"window": (1.0, 2)}, "each >= 0, or -1"),
        ({"page_size": 48, "cached": True}, "a power of two, but got page_size=48"),
        ({"page_size": -16, "cached": True}, "a power of two, but got page_size=-16"),
        ({"page_size": 16}, "needs cache_seqlens"),
        ({"kv": CacheType.INT8}, "but got kv=int8 without `cached`"),
        ({"cached": True, "token_scales": True}, "but got token_scales without `kv`"),
        ({"mask": "causal"}, "'causal' is not a valid MaskKind"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Features(**values)


def test_a_causal_mask_bounds_the_right_side_of_a_window() -> None:
    window = Features(window=(3, 5))
    assert shape(features=window).features.window == (3, 5)
    assert shape(features=window, causal=Causal.UPPER_LEFT).features.window == (3, -1)
    beside = shape(features=Features(window=(-1, 5)), causal=Causal.LOWER_RIGHT)
    assert beside == shape(causal=Causal.LOWER_RIGHT)  # and with nothing on the left no window is left


@pytest.mark.parametrize(
    ("causal", "window", "pairs"),
    [
        (Causal.NONE, (0, 0), 10),  # query i stands at key i + 6
        (Causal.NONE, (2, 0), 30),
        (Causal.NONE, (-1, 0), sum(range(7, 17))),
        (Causal.NONE, (0, 3), 4 * 10 - 6),
        (Causal.UPPER_LEFT, (2, -1), 1 + 2 + 3 * 8),
        (Causal.LOWER_RIGHT, (2, -1), 30),
    ],
)
def test_pairs_that_a_window_lets_through(causal: Causal, window: tuple[int, int], pairs: int) -> None:
    assert shape(features=Features(window=window), causal=causal).visible_pairs == pairs


def test_pairs_of_millions_of_queries_are_counted_by_a_formula() -> None:
    length = 3_000_000
    began = time.thread_time()
    long = shape(seqlen_q=length, seqlen_k=length, features=Features(window=(5, 5)))
    assert long.visible_pairs == 11 * length - 2 * (5 + 4 + 3 + 2 + 1)
    assert time.thread_time() - began < 1  # a loop over the queries takes several seconds

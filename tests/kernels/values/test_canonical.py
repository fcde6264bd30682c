"""The one form of a causal mask and a window: it lets the same pairs through, and all spellings have it in common."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktune.kernels.values.features import UNLIMITED, Causal, Features, Window, canonical
from blocktune.kernels.values.shape import AttentionShape

pytestmark = pytest.mark.triton_free

LENGTHS = st.integers(1, 12)
SIDES = st.integers(-1, 14) | st.sampled_from([2**31 - 2, 2**31 - 1, 2**63 - 1, 10**30])


def pairs(causal: Causal, window: Window | None, seqlen_q: int, seqlen_k: int) -> set[tuple[int, int]]:
    """The (query, key) pairs that a causal mask and a window let through, by their definition."""
    left, right = window or (UNLIMITED, UNLIMITED)
    right = right if causal is Causal.NONE else 0
    diagonal = 0 if causal is Causal.UPPER_LEFT else seqlen_k - seqlen_q
    return {
        (query, key)
        for query, key in product(range(seqlen_q), range(seqlen_k))
        if (left == UNLIMITED or key >= query + diagonal - left)
        and (right == UNLIMITED or key <= query + diagonal + right)
    }


@given(st.sampled_from(Causal), SIDES, SIDES, LENGTHS, LENGTHS, st.booleans())
@settings(max_examples=500, deadline=None)
def test_the_form_lets_the_same_pairs_through(
    causal: Causal, left: int, right: int, seqlen_q: int, seqlen_k: int, varies: bool
) -> None:
    form = canonical(causal, (left, right), seqlen_q, seqlen_k, varies=varies)
    assert canonical(*form, seqlen_q, seqlen_k, varies=varies) == form
    assert max(form[1] or (0, 0)) < max(seqlen_q, seqlen_k)  # what kernels compute with
    lengths = product(range(1, seqlen_q + 1), range(1, seqlen_k + 1)) if varies else [(seqlen_q, seqlen_k)]
    for own_q, own_k in lengths:
        assert pairs(*form, own_q, own_k) == pairs(causal, (left, right), own_q, own_k)


@given(SIDES, SIDES, SIDES, SIDES, LENGTHS, LENGTHS)
@settings(max_examples=500, deadline=None)
def test_windows_of_the_same_pairs_have_one_form(
    left: int, right: int, other_left: int, other_right: int, seqlen_q: int, seqlen_k: int
) -> None:
    windows = (left, right), (other_left, other_right)
    bounds = [(_bound(left, seqlen_k), _bound(right, seqlen_q)) for left, right in windows]
    forms = [canonical(Causal.NONE, window, seqlen_q, seqlen_k, varies=True) for window in windows]
    assert (forms[0] == forms[1]) is (bounds[0] == bounds[1])


def _bound(side: int, length: int) -> int:
    """A side of a window, that of no bound where it reaches past all keys."""
    return UNLIMITED if side >= length - 1 else side


FAR = 2**31 - 1


@pytest.mark.parametrize("window", ["-1:-1", f"{FAR}:{FAR}", "99:99", f"-1:{FAR}", f"{2**63}:-1"])
def test_what_lets_everything_through_is_no_window(window: str) -> None:
    assert _shape(window=window) == _shape()


@pytest.mark.parametrize("window", ["-1:0", f"{FAR}:0", f"{2**80}:0", "99:0"])
@pytest.mark.parametrize("seqlen_k", [100, 140])
def test_a_window_that_ends_at_the_diagonal_is_causal(window: str, seqlen_k: int) -> None:
    causal = Causal.LOWER_RIGHT if seqlen_k > 100 else Causal.UPPER_LEFT
    far = window.replace("99", "139")
    assert _shape(window=far, seqlen_k=seqlen_k) == _shape(causal=causal, seqlen_k=seqlen_k)
    assert _shape(window="9:0", seqlen_k=seqlen_k) == _shape(window="9:5", causal=causal, seqlen_k=seqlen_k)


def test_one_query_at_the_last_key_needs_no_causal_mask() -> None:
    alone = {"seqlen_q": 1, "seqlen_k": 700}
    forms = {_shape(causal=causal, words="cached", **alone) for causal in (Causal.NONE, Causal.LOWER_RIGHT)}
    assert forms == {_shape(window="-1:0", words="cached", **alone)}
    assert _shape(window="63:0", words="cached", **alone) == _shape(window="63:-1", words="cached", **alone)
    assert _shape(causal=Causal.UPPER_LEFT, words="cached", **alone).causal is Causal.UPPER_LEFT


def test_packed_sequences_of_other_lengths_stay_lower_right() -> None:
    assert _shape(window="-1:0", words="varlen").causal is Causal.LOWER_RIGHT
    assert _shape(window="-1:0", words="cached") == _shape(causal=Causal.LOWER_RIGHT, words="cached")


def _shape(
    *, window: str = "", words: str = "", causal: Causal = Causal.NONE, seqlen_q: int = 100, seqlen_k: int = 100
) -> AttentionShape:
    text = f"window={window} {words}" if window else words
    return AttentionShape(
        batch=1, num_heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=64, causal=causal,
        features=Features.parse(text),
    )  # fmt: skip

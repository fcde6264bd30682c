"""What a Python prompt shows of a dispatcher, an explanation and an occupancy."""

import pytest

from blocktune import attention, occupancy
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.selection.explanation import Explanation
from blocktune.runtime.selection.ladder import Rejection, Rung
from tests.support.fakes.dispatch_fakes import ListSource, pretend_h200, shape_like, tensors

pytestmark = pytest.mark.triton_free


def test_an_explanation_is_shown_in_words() -> None:
    shape = AttentionShape(batch=1, num_heads=8, seqlen_q=1024, head_dim=64)
    explanation = Explanation(
        rung=Rung.SDPA, reason="not tuned", shape=shape, passed_over=(Rejection(Rung.EXACT, "nothing was measured"),)
    )
    assert repr(explanation).split("\n") == [
        f"{shape.label}: {Rung.SDPA}: not tuned",
        f"  passed over {Rung.EXACT}: nothing was measured",
    ]


def test_an_occupancy_is_shown_in_words() -> None:
    found = occupancy(cc="9.0", registers=168, shared_bytes=115712, num_warps=4)
    assert repr(found) == str(found)
    assert repr(found).startswith("2 blocks/SM on compute capability 9.0")


def test_a_dispatcher_says_which_sources_served_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_h200(monkeypatch)
    dispatcher = Dispatcher(ListSource())
    assert repr(dispatcher) == "<Dispatcher: no call yet>"
    for length in (16, 16, 32):
        dispatcher(*tensors(shape_like(length)))
    assert repr(dispatcher) == "<Dispatcher: default 3>"
    assert repr(Dispatcher(ListSource(), strict=True)) == "<Dispatcher, strict: no call yet>"
    assert repr(attention).startswith("<blocktune.attention: ")

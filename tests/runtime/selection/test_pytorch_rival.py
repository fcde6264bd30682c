"""PyTorch's kernel serves untuned calls where it was faster nearby, and on devices where nothing was measured."""

from dataclasses import replace

import pytest

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.selection import pytorch_rival
from blocktune.runtime.selection.fallback import ConfigTable, climb_down
from blocktune.runtime.selection.ladder import Candidate, Rejection, Rung
from blocktune.runtime.selection.pytorch_rival import (
    NEAREST,
    PyTorchDuel,
    PytorchRival,
    reason_for_pytorch,
    rival_on,
    shipped_rival,
)

pytestmark = pytest.mark.triton_free

H200, A100 = device_named("h200"), device_named("a100_sxm4_80")
ODD = AttentionShape(batch=4, num_heads=8, num_heads_kv=8, seqlen_q=2048, seqlen_k=2048, head_dim=67, dtype="bfloat16")
ROUND = replace(ODD, head_dim=64, head_dim_v=64)


def duels(ratio: float, shape: AttentionShape = ODD) -> list[PyTorchDuel]:
    return [PyTorchDuel(replace(shape, batch=batch), 100.0 * ratio, 100.0) for batch in (1, 2, 8)]


@pytest.mark.parametrize(("ratio", "slower"), [(1.5, True), (1.01, True), (0.99, False), (0.7, False)])
def test_near_shapes_that_agree_are_believed(ratio: float, slower: bool) -> None:
    outlook = PytorchRival(duels(ratio)).outlook(ODD)
    assert outlook is not None
    assert outlook.is_slower is slower
    assert outlook.ratio == pytest.approx(ratio)


def test_near_shapes_that_do_not_agree_leave_a_margin() -> None:
    batches = {1: 0.6, 2: 1.3, 3: 0.7, 5: 1.25}
    outlook = PytorchRival(
        PyTorchDuel(replace(ODD, batch=batch), 100.0 * ratio, 100.0) for batch, ratio in batches.items()
    ).outlook(ODD)
    assert outlook is not None
    assert outlook.ratio < 1.0
    assert outlook.is_slower


def test_shapes_of_another_class_say_nothing() -> None:
    rival = PytorchRival(duels(1.5))
    for other in (
        replace(ODD, direction=Direction.BACKWARD),
        replace(ODD, dtype="float32"),
        replace(ODD, features=Features.parse("boolean")),
        replace(ODD, seqlen_q=1),
    ):
        assert rival.outlook(other) is None
    assert PytorchRival(duels(1.5)[:2]).outlook(ODD) is None  # too few


def test_shapes_with_few_tiles_are_a_class_of_their_own() -> None:
    few = replace(ODD, seqlen_q=256, seqlen_k=32768, batch=1, head_dim=128, head_dim_v=128)
    rival = PytorchRival(duels(1.5, few))
    assert rival.outlook(few) is not None
    assert rival.outlook(few, is_split=True) is None
    split = PytorchRival(replace(duel, is_split=True) for duel in duels(1.5, few))
    outlook = split.outlook(few, is_split=True)
    assert outlook is not None
    assert outlook.is_slower


def test_masks_of_float32_are_of_its_class() -> None:
    single = replace(ODD, dtype="float32")
    outlook = PytorchRival(duels(1.5, single)).outlook(replace(single, features=Features.parse("boolean")))
    assert outlook is not None
    assert outlook.is_slower


def test_the_nearest_shapes_decide() -> None:
    near = duels(2.0) + duels(2.0, replace(ODD, seqlen_q=2000))
    far = [duel for length in (64, 128, 256) for duel in duels(0.5, replace(ODD, seqlen_q=length))]
    outlook = PytorchRival([*far, *near]).outlook(ODD)
    assert outlook is not None
    assert outlook.shapes == NEAREST
    assert outlook.ratio > 1.9


def test_a_nearer_shape_counts_more() -> None:
    near, far = duels(2.0, ODD), duels(0.5, replace(ODD, seqlen_q=64, seqlen_k=64))
    outlook = PytorchRival([*near, *far]).outlook(ODD)
    assert outlook is not None
    assert 1.0 < outlook.ratio < 2.0


def test_on_a_device_without_measurements_pytorch_serves_what_it_computes() -> None:
    assert "was measured" in str(reason_for_pytorch(ROUND, A100.key))
    for other in ("window=64:0", "softcap", "varlen", "alibi"):
        assert (
            reason_for_pytorch(replace(ROUND, causal=Causal.UPPER_LEFT, features=Features.parse(other)), A100.key)
            is None
        )
    assert reason_for_pytorch(replace(ROUND, causal=Causal.LOWER_RIGHT, seqlen_k=4096), A100.key) is None


def test_what_ships_for_an_h200_gives_wide_float32_to_pytorch_and_keeps_16_bits() -> None:
    assert shipped_rival(H200.key, Direction.FORWARD, 2, False) is not None
    wide = replace(ROUND, dtype="float32", head_dim=160, head_dim_v=160, direction=Direction.BACKWARD)
    assert "may be faster" in str(reason_for_pytorch(wide, H200.key))
    for direction in Direction:
        assert reason_for_pytorch(replace(ROUND, direction=direction), H200.key) is None
    assert Dispatcher().explain(ROUND, device=A100).rung is Rung.SDPA


def test_scores_that_take_too_much_memory_are_not_left_to_pytorch() -> None:
    """There is no fused kernel for grouped heads of float32."""
    wide = replace(ROUND, dtype="float32", head_dim=160, head_dim_v=160, direction=Direction.BACKWARD, batch=1)
    grouped = replace(wide, num_heads=16, num_heads_kv=2)
    assert "may be faster" in str(reason_for_pytorch(grouped, H200.key))
    assert reason_for_pytorch(replace(grouped, seqlen_q=8192, seqlen_k=8192), H200.key) is None


def test_mathematics_serve_no_device_without_measurements() -> None:
    grouped = replace(ROUND, dtype="float32", num_heads=16, num_heads_kv=2, batch=1)
    assert reason_for_pytorch(grouped, A100.key) is None
    assert "was measured" in str(reason_for_pytorch(replace(grouped, num_heads_kv=16), A100.key))


def test_the_ladder_ends_at_pytorch_after_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ConfigTable([], rival=rival_on(A100))
    *measured, last = climb_down(table, ROUND, A100.limits)
    assert isinstance(last, Rejection)
    assert last.rung is Rung.SDPA
    assert all(isinstance(step, Rejection) for step in measured)
    assert any(isinstance(step, Candidate) for step in climb_down(table, ROUND, A100.limits, competes=False))
    strict = list(climb_down(table, ROUND, A100.limits, strict=True))
    assert not any(isinstance(step, Rejection) and step.rung is Rung.SDPA for step in strict)
    monkeypatch.setattr(pytorch_rival, "shipped_correction", lambda key: object())
    assert reason_for_pytorch(ROUND, A100.key) is None  # measured, and nothing says that it is slower

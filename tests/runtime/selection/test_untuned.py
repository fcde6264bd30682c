"""The one decision for shapes that were not tuned: what it takes over from others, what it computes, what it says."""

import dataclasses
import json
import math
from collections.abc import Mapping

import pytest

from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.runtime.selection.correction import (
    DeviceCorrection,
    LogRatio,
    Measured,
    Trust,
    config_from,
    correction_document,
    relative_config,
    shipped_correction,
)
from blocktune.runtime.selection.expectation import distance_between
from blocktune.runtime.selection.fallback import ConfigTable, climb_down
from blocktune.runtime.selection.ladder import Candidate, Rung
from blocktune.runtime.selection.near_shapes import representative
from blocktune.runtime.selection.reasons import explain_candidate
from blocktune.runtime.selection.untuned import LAUNCH_BOUND_US, Untuned, shipped_untuned
from blocktune.runtime.store_reader.tuned_config import TunedConfig

pytestmark = pytest.mark.triton_free

H200 = device_named("h200")
TRUST = Trust(noise=0.008, drift=0.02, prior=0.02, doubt=0.05, shift=0.5, caution=0.5)
DECODE = get_kernel("flash_decode_hopper")
FORWARD = get_kernel("flash_fwd_hopper")


def decode_shape(**changes: int) -> AttentionShape:
    sizes = {"batch": 4, "num_heads": 64, "num_heads_kv": 8, "seqlen_q": 1, "seqlen_k": 32768} | changes
    return AttentionShape(**sizes, head_dim=128, head_dim_v=128)


def prefill_shape(seqlen: int = 4096, head_dim: int = 128) -> AttentionShape:
    return AttentionShape(
        batch=4, num_heads=16, num_heads_kv=16, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim,
        head_dim_v=head_dim, causal=Causal.UPPER_LEFT,
    )  # fmt: skip


def default_of(shape: AttentionShape) -> KernelConfig:
    return kernels_for(shape, H200.limits)[0].default_config(shape, H200.limits)


def other_than_default(shape: AttentionShape, **changes: int) -> KernelConfig:
    default = default_of(shape)
    return KernelConfig.of(default.kernel, default.parameters | changes)


def measured(shape: AttentionShape, ratios: Mapping[KernelConfig, float], level: float = 0.0) -> Measured:
    """Times of configs of the first kernel over its default's, where the model says that all are equal."""
    first = kernels_for(shape, H200.limits)[0]
    default = default_of(shape)
    return Measured(
        shape=shape,
        first=first.name,
        level=level,
        defaults={first.name: LogRatio(0.0, 0.0)},
        configs={
            first.name: {
                relative_config(first, config, default): LogRatio(math.log(ratio), 0.0)
                for config, ratio in ratios.items()
            }
        },
    )


def decision(*shapes: Measured, device: DeviceSpec = H200, us: float = 100.0) -> Untuned:
    """By what was measured for these shapes, and a model that takes all configs for equally fast."""
    return Untuned(device, DeviceCorrection(device=H200.key, trust=TRUST, measured=shapes), lambda *_: us)


def test_a_parameter_that_follows_from_the_shape_is_counted_from_the_default() -> None:
    there, here = decode_shape(batch=1, seqlen_k=8192), decode_shape(batch=16, seqlen_k=32768)
    default_there, default_here = (DECODE.default_config(shape, H200.limits) for shape in (there, here))
    assert default_there.parameters["splits"] > default_here.parameters["splits"]
    same = relative_config(DECODE, default_there, default_there)
    assert same is not None
    assert config_from(DECODE, same, default_here) == default_here
    twice = dataclasses.replace(
        default_there, extra=(("splits", 2 * default_there.parameters["splits"]), default_there.extra[1])
    )
    steps = relative_config(DECODE, twice, default_there)
    assert steps is not None
    assert config_from(DECODE, steps, default_here).parameters["splits"] == 2 * default_here.parameters["splits"]


def test_steps_end_where_the_choices_end() -> None:
    there, here = decode_shape(batch=1), decode_shape(batch=64)
    default_there, default_here = (DECODE.default_config(shape, H200.limits) for shape in (there, here))
    fewer = dataclasses.replace(default_there, extra=(("splits", 1), default_there.extra[1]))
    steps = relative_config(DECODE, fewer, default_there)
    assert steps is not None
    assert config_from(DECODE, steps, default_here).parameters["splits"] == 1


def test_a_config_that_lacks_a_parameter_has_no_steps() -> None:
    default = DECODE.default_config(decode_shape(), H200.limits)
    assert relative_config(DECODE, dataclasses.replace(default, extra=()), default) is None
    odd = dataclasses.replace(default, extra=(("splits", 3), default.extra[1]))
    assert relative_config(DECODE, odd, default) is None


def test_what_was_measured_before_the_kernel_got_a_parameter_is_no_candidate() -> None:
    shape, near = prefill_shape(4096), prefill_shape(3000)
    known = measured(near, {other_than_default(near, keep_p=1): 0.9})
    older = {
        kernel: {tuple(pair for pair in config if pair[0] != "keep_p"): ratio for config, ratio in ratios.items()}
        for kernel, ratios in known.configs.items()
    }
    choices = decision(dataclasses.replace(known, configs=older)).choices(shape)
    assert choices[0].config == default_of(shape)


def test_without_measurements_the_default_is_taken() -> None:
    for shape in (prefill_shape(), decode_shape(), prefill_shape(head_dim=192)):
        first = decision().choices(shape)[0]
        assert (first.config, first.spread, first.time_us) == (default_of(shape), 0.0, pytest.approx(100.0))


def test_the_default_serves_what_takes_as_long_as_a_launch() -> None:
    shape, near = prefill_shape(4096), prefill_shape(3072)
    known = measured(near, {other_than_default(near, keep_p=1): 0.9})
    short, long = (decision(known, us=us).choices(shape) for us in (0.9 * LAUNCH_BOUND_US, 1.2 * LAUNCH_BOUND_US))
    assert [one.config for one in short] == [default_of(shape)]
    assert long[0].config == other_than_default(shape, keep_p=1)


def test_what_is_faster_on_near_shapes_is_taken_and_what_is_slower_is_not() -> None:
    shape, near = prefill_shape(4096), prefill_shape(3072)
    faster, slower = other_than_default(near, keep_p=1), other_than_default(near, early_p=0)
    choices = decision(measured(near, {faster: 0.9, slower: 1.1})).choices(shape)
    assert choices[0].config == other_than_default(shape, keep_p=1)
    assert 0.9 < choices[0].ratio < 0.95
    assert choices[0].shapes == 1
    places = {one.config: place for place, one in enumerate(choices)}
    assert places[default_of(shape)] < places[other_than_default(shape, early_p=0)]


def test_the_nearest_shape_counts_most() -> None:
    shape = prefill_shape(4096)
    near, far = prefill_shape(3584), prefill_shape(16384)
    config = other_than_default(shape, keep_p=1)
    assert default_of(near) == default_of(far) == default_of(shape)
    up = decision(measured(near, {config: 0.9}), measured(far, {config: 1.1})).choices(shape)
    down = decision(measured(near, {config: 1.1}), measured(far, {config: 0.9})).choices(shape)
    ratio_up, ratio_down = (next(one.ratio for one in found if one.config == config) for found in (up, down))
    assert ratio_up < 1 < ratio_down


def test_other_head_dimensions_say_less() -> None:
    shape, config = prefill_shape(), other_than_default(prefill_shape(), keep_p=1)
    ratios = []
    for head_dim in (128, 64):
        near = prefill_shape(3000, head_dim)
        same = KernelConfig.of(config.kernel, config.parameters)
        choices = decision(measured(near, {same: 0.9})).choices(shape)
        ratios.append(next(one.ratio for one in choices if one.config == config))
    assert 0.9 < ratios[0] < ratios[1] < 1.0


def test_a_few_queries_at_the_end_of_many_keys_are_near_with_a_causal_mask_and_without() -> None:
    full, square = decode_shape(seqlen_q=4), prefill_shape(4096)
    causal = dataclasses.replace(full, causal=Causal.LOWER_RIGHT)
    assert distance_between(full, causal) < 0.01
    assert distance_between(square, dataclasses.replace(square, causal=Causal.NONE)) == pytest.approx(3.0, abs=0.01)


def test_far_shapes_on_the_same_side_do_not_make_sure() -> None:
    shape, config = prefill_shape(4096), other_than_default(prefill_shape(4096), keep_p=1)
    lengths = range(2500, 2508)
    spreads = [
        next(one.spread for one in found if one.config == config)
        for found in (
            decision(*(measured(prefill_shape(seqlen), {config: 0.9}) for seqlen in lengths[:count])).choices(shape)
            for count in (1, 8)
        )
    ]
    nearest = math.sqrt(TRUST.noise**2 + 1.4 * TRUST.drift**2)
    assert spreads[0] > spreads[1] > nearest / 2


def test_a_stored_winners_splits_are_not_copied() -> None:
    near, shape = decode_shape(batch=1, seqlen_k=8192), decode_shape(batch=32, seqlen_k=16384)
    winner = default_of(near)
    assert winner.parameters["splits"] != default_of(shape).parameters["splits"]
    row = TunedConfig(shape=near, config=winner, origin=Origin.MEASURED, time_us=20.0)
    assert decision(measured(near, {})).choices(shape, [row])[0].config == default_of(shape)


def test_a_stored_winner_of_a_shape_nearly_the_same_is_taken_and_of_a_far_one_is_not() -> None:
    shape, config = prefill_shape(4096), other_than_default(prefill_shape(4096), keep_p=1)
    rows = {
        seqlen: TunedConfig(shape=prefill_shape(seqlen), config=config, origin=Origin.MEASURED)
        for seqlen in (4000, 16384)
    }
    assert decision().choices(shape, [rows[4000]])[0].config == config
    assert decision().choices(shape, [rows[16384]])[0].config == default_of(shape)


def test_a_measurement_of_another_device_is_less_sure() -> None:
    shape, near = prefill_shape(4096), prefill_shape(3000)
    config = other_than_default(near, keep_p=1)
    known = measured(near, {config: 0.9})
    here = next(one for one in decision(known).choices(shape) if one.config == config)
    there = next(one for one in decision(known, device=device_named("h100")).choices(shape) if one.config == config)
    assert here.spread < there.spread


def test_the_level_is_that_of_the_measured_shapes() -> None:
    choices = decision(measured(prefill_shape(3000), {}, level=math.log(1.2))).choices(prefill_shape())
    assert choices[0].time_us == pytest.approx(120.0)


def test_a_correction_survives_its_file() -> None:
    near = prefill_shape(3000)
    one = measured(near, {other_than_default(near, keep_p=1): 0.9}, level=0.25)
    one = dataclasses.replace(one, hashes={FORWARD.name: FORWARD.source_hash})
    document = correction_document(H200.key, Trust(shift=0.25), [one])
    again = DeviceCorrection.from_json(json.loads(json.dumps(document)))
    assert again.trust == Trust(shift=0.25)
    (kept,) = again.measured
    assert (kept.shape, kept.first, kept.level) == (near, FORWARD.name, 0.25)
    assert not kept.is_older(FORWARD.name)
    ((config, ratio),) = kept.configs[FORWARD.name].items()
    assert dict(config)["keep_p"] == 1
    assert ratio.measured == pytest.approx(math.log(0.9), abs=0.001)
    older = correction_document(H200.key, Trust(), [dataclasses.replace(one, hashes={FORWARD.name: "0" * 16})])
    assert DeviceCorrection.from_json(older).measured[0].is_older(FORWARD.name)


def test_a_correction_that_was_read_while_other_kernels_competed_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped_correction.cache_clear()
    with monkeypatch.context() as other:
        other.setattr("blocktune.kernels.registry.KERNELS", {})
        elsewhere = shipped_correction(H200.key)
    shipped_correction.cache_clear()
    assert elsewhere == shipped_correction(H200.key)
    assert elsewhere is not None


def test_a_document_of_another_format_is_refused() -> None:
    with pytest.raises(UsageError, match="tune lab calibrate"):
        DeviceCorrection.from_json({"format": "blocktune-results", "schema": 1})


def test_the_ladder_asks_the_decision_below_all_measurements_of_the_shape() -> None:
    shape, near = prefill_shape(4096), prefill_shape(3000)
    config = other_than_default(near, keep_p=1)
    table = ConfigTable([], lambda: decision(measured(near, {config: 0.9})))
    step = next(step for step in climb_down(table, shape, H200.limits) if isinstance(step, Candidate))
    assert (step.rung, step.config, step.origin) == (Rung.EXPECTED, config, Origin.BORROWED)
    explanation = explain_candidate(step, shape, device=H200)
    assert "expected to take" in explanation.headline
    assert f"compared with {default_of(shape).label}, 100 us by" in str(explanation)
    assert explanation.to_json()["compared"][0]["config"] == config.to_json()
    assert not explanation.is_measured_here
    assert "measurements of another device" not in explanation.headline
    elsewhere = explain_candidate(step, shape, device=device_named("gh200"))
    assert "by the model and measurements of another device, nvidia h200: `tune run" in elsewhere.headline
    known = TunedConfig(shape=shape, config=default_of(shape), origin=Origin.MEASURED, time_us=90.0)
    table = ConfigTable([known], lambda: decision(measured(near, {config: 0.9})))
    step = next(step for step in climb_down(table, shape, H200.limits) if isinstance(step, Candidate))
    assert (step.rung, step.config) == (Rung.EXACT, known.config)


def test_a_stored_prediction_of_the_shape_comes_before_what_is_expected_and_one_of_another_after() -> None:
    shape = prefill_shape(4096)
    own, near = other_than_default(shape, early_p=1), other_than_default(shape, keep_p=1)
    rows = [
        TunedConfig(shape=shape, config=own, origin=Origin.PREDICTED),
        TunedConfig(shape=prefill_shape(3000), config=near, origin=Origin.PREDICTED),
    ]
    found = list(climb_down(ConfigTable(rows, decision), shape, H200.limits))
    steps = [(step.rung, step.config) for step in found if isinstance(step, Candidate)]
    assert steps[:2] == [(Rung.PREDICTED, own), (Rung.EXPECTED, default_of(shape))]
    assert [config for rung, config in steps if rung is Rung.PREDICTED] == [own, near]


def test_a_model_that_decodes_is_decided_for_eight_times_until_its_keys_have_doubled() -> None:
    asked: list[AttentionShape] = []

    def predict(kernel: object, config: KernelConfig, shape: AttentionShape, device: DeviceSpec) -> float:
        asked.append(shape)
        return 100.0

    table = ConfigTable([], lambda: Untuned(H200, DeviceCorrection(device=H200.key), predict))
    for keys in range(4096, 8192, 16):
        table.expected(decode_shape(seqlen_k=keys + 1))
    assert {shape.seqlen_k for shape in asked} == {4096 + 512 * step for step in range(1, 9)}


def test_prefill_is_decided_for_as_it_is() -> None:
    assert representative(prefill_shape(4097)) == prefill_shape(4097)
    assert representative(decode_shape(seqlen_k=8192)) == decode_shape(seqlen_k=8192)


def test_a_broken_correction_leaves_the_other_rungs(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Untuned:
        raise UsageError("the file is torn")

    shape = prefill_shape()
    found = [step for step in climb_down(ConfigTable([], broken), shape, H200.limits) if isinstance(step, Candidate)]
    assert (found[0].rung, found[0].config) == (Rung.DEFAULT, default_of(shape))
    assert "the file is torn" in caplog.text


def test_corrections_ship_for_h100_and_h200_and_the_larger_one_serves_their_capability() -> None:
    for own in (H200.key, device_named("h100").key):
        correction = shipped_correction(own)
        assert correction is not None
        assert correction.device == own
    assert shipped_correction(device_named("gh200").key) == shipped_correction(H200.key)
    assert shipped_correction(device_named("a100").key) is None
    assert shipped_untuned(device_named("a100")) is None


def test_the_shipped_decision_takes_the_default_splits_where_another_shapes_were_slower() -> None:
    untuned = shipped_untuned(H200)
    assert untuned is not None
    rows = [
        TunedConfig(shape=near, config=default_of(near), origin=Origin.MEASURED, time_us=20.0)
        for near in (decode_shape(batch=1, num_heads=32, seqlen_k=8192), decode_shape(batch=8, num_heads=32))
    ]
    shape = decode_shape()
    chosen = untuned.choices(shape, rows)[0].config
    usual = default_of(shape).parameters["splits"]
    assert chosen.parameters["splits"] in (usual, 2 * usual)

"""What is put together about a config, and the words for it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.records.records import Best, Environment, Outcome, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.portable.forward.pointers import FlashForward
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.cost.analysis import Analysis, analyse, measured_time_us, steps_down
from blocktune.tuner.cost.bands import band_text
from blocktune.tuner.cost.breakdown import CostBreakdown
from blocktune.tuner.cost.term_texts import ADVICE, BACKWARD_TERMS, FACTS, TERMS
from blocktune.tuner.cost.text import text_of_analysis
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses

pytestmark = pytest.mark.triton_free

H200 = device_named("h200")
SHAPE = complete_shape(8192, 128)
KERNEL = get_kernel("flash_fwd")
CONFIG = KernelConfig.of("flash_fwd", {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3, "schedule": 0})


def analysis(
    shape: AttentionShape = SHAPE,
    device: DeviceSpec = H200,
    config: KernelConfig = CONFIG,
    measured_us: float | None = None,
    **changes: Any,
) -> Analysis:
    values = {"registers": 168, "shared_bytes": 131_072, "num_warps": 8, "tensor_cores": "wgmma"} | changes
    shared = SharedAccesses() if values["tensor_cores"] == "none" else None
    return analyse(
        KERNEL, config, shape, device, CompiledCode(KernelResources(**values), shared), measured_us=measured_us
    )


def bound_by(found: Analysis, **terms: float) -> Analysis:
    """The same with a prediction of 1000 µs in which only these terms matter, and a measurement near it."""
    zeros = dict.fromkeys(CostBreakdown.__dataclass_fields__, 1.0)
    breakdown = CostBreakdown(**(zeros | {"total_us": 1000.0} | terms))
    return replace(found, breakdown=breakdown, measured_us=found.measured_us or 1000.0)


def test_every_model_takes_part() -> None:
    found = analysis()
    assert found.breakdown is not None
    assert found.waves is not None
    assert found.waves.grid_blocks == 64 * 2 * 16
    assert found.on_chip is not None
    assert found.on_chip.shared_bytes == 131_072
    assert list(found.traffic) == list(found.rooflines) == ["standard", "v1", "v2", "v2_perfect_l2"]
    bytes_ = {name: traffic.total_bytes for name, traffic in found.traffic.items()}
    assert bytes_["v1"] > bytes_["v2"] > bytes_["v2_perfect_l2"]
    assert bytes_["v1"] > bytes_["standard"], "64 keys a pass are too few for the output's round trips at d = 128"
    assert found.block_intensity == 128
    assert found.to_json()["prediction"]["binding"] == found.breakdown.binding


class NewForward(FlashForward):
    """A kernel of which no model has heard."""

    name = "flash_new"


def test_a_new_forward_kernel_is_explained_without_a_line_in_any_model() -> None:
    kernel = NewForward()
    config = kernel.default_config(SHAPE, H200.limits)
    resources = KernelResources(registers=168, shared_bytes=131_072, num_warps=8, tensor_cores="wgmma")
    found = analyse(kernel, config, SHAPE, H200, CompiledCode(resources, None))
    assert list(found.traffic) == ["standard", "v1", "v2", "v2_perfect_l2"]
    assert found.breakdown is not None
    assert found.waves is not None
    assert found.on_chip is not None
    assert found.on_chip.shared_bytes == kernel.shared_bytes(config, SHAPE, H200.limits)
    assert "Bound by" in text_of_analysis(found)


def test_a_new_forward_kernel_with_a_window_is_counted_with_it() -> None:
    class NewWindow(NewForward):
        features = frozenset({"window"})

    problem, kernel = replace(SHAPE, features=Features(window=(127, 0))), NewWindow()
    resources = KernelResources(registers=168, shared_bytes=131_072, num_warps=8, tensor_cores="wgmma")
    found = analyse(kernel, kernel.default_config(problem, H200.limits), problem, H200, CompiledCode(resources, None))
    assert found.traffic["own"].total_bytes < analysis().traffic["v2"].total_bytes / 4


def test_steps_down_are_those_of_the_kernel_s_choices() -> None:
    steps = steps_down(KERNEL, CONFIG, SHAPE, H200.limits)
    assert set(steps) == {"block_m 128→64", "block_n 64→32", "num_warps 8→4", "num_stages 3→2"}
    assert steps["num_stages 3→2"] == 131_072 - 2 * 64 * 128 * 2


def test_the_model_s_error_is_a_fraction_of_the_measured_time() -> None:
    assert analysis().model_error is None
    found = analysis(measured_us=1000.0)
    assert found.breakdown is not None
    assert found.model_error == pytest.approx(found.breakdown.total_us / 1000 - 1)
    slow, fast = (
        text_of_analysis(analysis(measured_us=found.breakdown.total_us * factor)) for factor in (1 / 1.2, 1.25)
    )
    assert "the model is 20.0 % above it" in slow
    assert "the model is 20.0 % below it" in fast
    assert "No measurement of this config" in text_of_analysis(analysis())


@pytest.mark.parametrize(("factor", "is_explained"), [(0.79, False), (0.82, True), (1.32, True), (1.35, False)])
def test_a_model_that_is_far_from_the_measurement_explains_nothing(factor: float, is_explained: bool) -> None:
    plain = analysis()
    assert plain.is_explained
    assert plain.breakdown is not None
    found = analysis(measured_us=plain.breakdown.total_us * factor)
    assert found.is_explained is is_explained
    text, document = text_of_analysis(found), found.to_json()
    for advice in ("Bound by ", "To reduce ", "Exponentials take "):
        assert (advice in text) is is_explained
    assert ("The model does not explain this config" in text) is not is_explained
    assert (document["prediction"]["binding"] is not None) is document["is_explained"] is is_explained
    for fact in ("Predicted ", "Measured ", "tensor cores (wgmma)", "Limited by registers", "Tiles fill at least"):
        assert fact in text


@pytest.mark.parametrize(
    ("kernel", "device", "reason"),
    [
        ("flash_fwd", H200, "since measured times of such configs may be over 25 %"),
        ("flash_fwd", device_named("a100"), "since nothing like this was measured on this device"),
        ("flash_fwd_hopper", H200, ""),
    ],
)
def test_advice_needs_a_narrow_band_or_a_measurement(kernel: str, device: DeviceSpec, reason: str) -> None:
    found = of_kernel(kernel, SHAPE, device=device)
    text = text_of_analysis(found)
    assert f" µs, {band_text(kernel, SHAPE, device)}; " in text.splitlines()[0]
    assert ("No advice is given, " + reason in text) is bool(reason)
    assert ("To reduce " in text) is found.gives_advice is found.to_json()["gives_advice"] is not bool(reason)
    assert found.breakdown is not None
    assert "To reduce " in text_of_analysis(replace(found, measured_us=found.breakdown.total_us))


def test_the_words_name_what_binds_and_what_lifts_it() -> None:
    text = text_of_analysis(bound_by(analysis(), tensor_us=900.0))
    assert "Predicted 1,000.0 µs" in text
    assert "Bound by tensor (matrix products), alone 900.0 µs; units overlap" in text
    assert f"To reduce tensor: {FACTS['tensor']}" in text
    assert "run on tensor cores (wgmma)" in text
    assert "For 2 blocks you need ≤ 128 registers/thread (now 168) and ≤ 115,712 B of shared memory" in text
    assert "num_stages 3→2 gives 98,304 B" in text
    spilling = text_of_analysis(bound_by(analysis(), spill_us=900.0))
    assert f"To reduce spill: {FACTS['spill']} A smaller `block_m` needs" in spilling, "8 warps are the most"


def test_terms_that_are_level_bind_together_each_with_its_own_time() -> None:
    text = text_of_analysis(bound_by(analysis(), tensor_us=800.0, exp_us=784.0))
    line = text.splitlines()[0]
    assert (
        "Bound by tensor (matrix products), alone 800.0 µs and exp (exponentials of the softmax), alone 784.0" in line
    )
    assert "%" not in line.partition("Bound by")[2], "shares of units that overlap would add up to more than the whole"
    assert "Exponentials take 0.98 times as long" in text


def test_every_term_of_the_model_has_words() -> None:
    terms = {name.removesuffix("_us") for name in CostBreakdown.__dataclass_fields__} - {"total"}
    assert set(TERMS) == set(FACTS) == terms
    assert set(BACKWARD_TERMS) | set(ADVICE) <= terms


@pytest.mark.parametrize(
    ("device", "used", "says"),
    [
        ("rtx2070", "none", "without tensor cores, by plain multiply-adds; Triton uses none below"),
        ("h200", "none", "by plain multiply-adds; this GPU has wgmma"),
        ("h200", "mma", "an older instruction, mma where the GPU has wgmma"),
    ],
)
def test_the_instruction_of_the_products_is_told(device: str, used: str, says: str) -> None:
    shape = complete_shape(1024, 64, dtype="fp16")
    assert says in text_of_analysis(analysis(shape, device_named(device), shared_bytes=40_000, tensor_cores=used))


def test_l2_is_named_where_the_theorem_is_too_pessimistic() -> None:
    config = replace(CONFIG, block_m=64)
    memory_us = analysis(config=config).traffic["v2"].total_bytes / 4.8e6
    text = text_of_analysis(analysis(config=config, measured_us=memory_us / 4))
    assert f"would take {memory_us:,.1f} µs: at least 75 % of these bytes came from L2" in text
    assert "came from L2" not in text_of_analysis(analysis(config=config, measured_us=memory_us * 1.01))
    assert "came from L2" not in text_of_analysis(analysis(config=config)), "a prediction proves nothing"


def test_standard_attention_that_does_not_fit_is_told() -> None:
    assert "4 GiB per head" in text_of_analysis(analysis(complete_shape(32768, 64, heads=64)))


def test_a_block_that_does_not_fit_is_explained_without_a_time() -> None:
    found = analysis(shared_bytes=300_000)
    assert (found.breakdown, found.waves) == (None, None)
    assert "0 blocks/SM: this kernel cannot be launched" in text_of_analysis(found)
    assert found.to_json()["prediction"] is None


def test_an_unknown_rate_leaves_the_rest() -> None:
    found = analysis(device=replace(H200, memory_gbs=None))
    assert (found.breakdown, dict(found.rooflines)) == (None, {})
    text = text_of_analysis(found)
    assert "No time is predicted: memory_gbs of NVIDIA H200 is unknown." in text
    assert "1 block/SM" in text


def of_kernel(
    name: str, shape: AttentionShape, measured_us: float | None = None, device: DeviceSpec = H200
) -> Analysis:
    """The kernel's default config, with resources of Hopper."""
    kernel = get_kernel(name)
    config = kernel.default_config(shape, device.limits)
    resources = KernelResources(
        registers=120, shared_bytes=70_000, num_warps=kernel.total_warps(config), tensor_cores=device.limits.mma
    )
    return analyse(kernel, config, shape, device, CompiledCode(resources, None), measured_us=measured_us)


BACKWARD = replace(complete_shape(4096, 128, batch=2, heads=16, kv_heads=4), direction=Direction.BACKWARD)
DECODE = replace(complete_shape(8192, 128, batch=1, heads=32, kv_heads=8), seqlen_q=1)


def test_a_backward_is_explained_by_its_own_loops() -> None:
    found = bound_by(of_kernel("flash_bwd_hopper", BACKWARD, measured_us=800.0), tensor_us=700.0, total_us=900.0)
    assert list(found.traffic) == ["standard", "own", "own_perfect_l2"]
    assert [one.name for one in found.passes] == ["delta", "dk_dv", "dq"]
    assert found.waves is not None
    assert found.waves.grid_blocks == 32 * 2 * 4, "a block for every 128 keys of every key head"
    assert found.block_intensity is None
    text = text_of_analysis(found)
    for part in (
        "Bound by tensor (matrix products)",
        "five products in one pass",
        "Its launches move at least: delta ",
        "set by the rows that a block owns",
        "Measured 800.0 µs: the model is 12.5 % above it",
        "and warps that copy leave most of theirs",
    ):
        assert part in text
    assert found.to_json()["traffic"]["own"]["dk_dv"]["sums_added"] > 0


def test_decoding_is_bound_by_memory_and_told_in_gigabytes_a_second() -> None:
    found = bound_by(of_kernel("flash_decode", DECODE, measured_us=20.0), hbm_us=18.0, total_us=21.0)
    assert found.block_intensity == 4, "four query heads share every key"
    assert found.waves is not None
    assert found.waves.grid_blocks == 8 * dict(found.config.extra)["splits"]
    text = text_of_analysis(found)
    moved = found.traffic["own_perfect_l2"].total_bytes
    assert f"{moved / 1e6:,.1f} MB at least, {moved / 20e3:,.0f} GB/s" in text
    assert "To reduce hbm: Every key must be read once." in text


def test_a_window_takes_time_and_bytes_away() -> None:
    plain = complete_shape(8192, 64)
    wide, narrow = (
        of_kernel("flash_fwd_general", replace(plain, features=features))
        for features in (Features(softcap=True), Features(window=(1023, 0)))
    )
    assert wide.breakdown is not None
    assert narrow.breakdown is not None
    assert wide.breakdown.tensor_us > 6 * narrow.breakdown.tensor_us
    assert wide.traffic["own"].total_bytes > 5 * narrow.traffic["own"].total_bytes
    assert narrow.on_chip is not None


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("flash_fwd_sparse", Direction.FORWARD),
        ("flash_bwd_sparse", Direction.BACKWARD),
        ("flash_bwd_hopper_sparse", Direction.BACKWARD),
    ],
)
def test_a_block_mask_is_taken_to_leave_a_quarter(name: str, direction: Direction) -> None:
    shape = replace(complete_shape(8192, 64), direction=direction, features=Features(mask=MaskKind.BLOCK_SPARSE))
    found = of_kernel(name, shape)
    assert found.density == 0.25
    assert found.flops == shape.flops / 4
    assert found.rooflines["own"].flops == shape.flops // 4
    assert found.breakdown is not None
    seconds = 8192**2 / 4 * 64 / (132 * H200.limits.exp_per_clock * 0.9 * 1.83e9)
    assert found.breakdown.exp_us == pytest.approx(seconds * 1e6, rel=0.02)
    assert "a block mask of density 0.25" in text_of_analysis(found)


def test_v1_has_one_count_whatever_the_cache() -> None:
    found = of_kernel("flash_v1", complete_shape(4096, 64))
    assert found.traffic["own"] == found.traffic["own_perfect_l2"]
    assert found.waves is not None
    assert found.waves.grid_blocks == found.shape.batch * found.shape.num_heads
    text = text_of_analysis(found)
    assert "With this traffic, of which blocks share nothing, the problem has" in text
    assert found.block_intensity is None, "its blocks own keys and walk along the queries"
    assert "set by block_m alone" not in text


@pytest.mark.parametrize("device", ["h200", "a100_sxm4_80", "rtx2070"])
@pytest.mark.parametrize("name", ["flash_bwd_split", "flash_bwd_fused", "flash_decode"])
def test_every_device_is_explained_without_a_gpu(device: str, name: str) -> None:
    spec = device_named(device)
    shape = replace(DECODE if name == "flash_decode" else BACKWARD, dtype="float16", head_dim=64, head_dim_v=64)
    kernel = get_kernel(name)
    resources = KernelResources(registers=100, shared_bytes=30_000, num_warps=4, tensor_cores=spec.limits.mma)
    code = CompiledCode(resources, SharedAccesses(loads=8, load_wavefronts=16))
    found = analyse(kernel, kernel.default_config(shape, spec.limits), shape, spec, code)
    assert found.breakdown is not None
    assert text_of_analysis(found).startswith("Predicted ")


def trial(config: KernelConfig, time_us: float | None, **changes: Any) -> Trial:
    environment = Environment(triton="3.6.0", ptxas="12.8.93", torch="2.13.0", cuda="12.8", driver="580.65.06")
    values = {
        "device": H200,
        "environment": environment,
        "shape": SHAPE,
        "config": config,
        "kernel_hash": "0123456789abcdef",
        "outcome": Outcome.OK if time_us else Outcome.PREDICTED,
        "time_us": time_us,
    }
    return Trial(**(values | changes))


def test_a_measured_time_is_that_of_the_very_code(tmp_path: Path) -> None:
    other = replace(CONFIG, block_n=128)
    with ResultStore.open(tmp_path / "results.db") as store:

        def known(config: KernelConfig, kernel_hash: str = "0123456789abcdef") -> float | None:
            return measured_time_us(store, H200, SHAPE, config, kernel_hash)

        assert known(CONFIG) is None
        store.record(trial(CONFIG, 900.0))
        store.record(trial(other, 950.0))
        assert (known(CONFIG), known(other)) == (900.0, 950.0)
        assert known(CONFIG, "fedcba9876543210") is None
        won = trial(CONFIG, 900.0)
        store.set_best(
            Best(
                device=H200,
                environment=won.environment,
                shape=SHAPE,
                config=CONFIG,
                kernel_hash=won.kernel_hash,
                origin=Origin.MEASURED,
                time_us=880.0,
            )
        )
        assert (known(CONFIG), known(other)) == (880.0, 950.0)

"""What is put together about a config, and the words for it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.records import Best, Environment, Outcome, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.config import KernelConfig, Origin
from blocktune.kernels.device import DeviceSpec, device_named
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.resources import KernelResources
from blocktune.kernels.shape import AttentionShape
from blocktune.tuner.analysis import Analysis, analyse, measured_time_us, steps_down
from blocktune.tuner.analysis_terms import BACKWARD_LIFTS, BACKWARD_TERMS, DECODE_LIFTS, LIFTS, TERMS
from blocktune.tuner.analysis_text import explain
from blocktune.tuner.cost_model import CostBreakdown
from blocktune.tuner.defaults import complete_shape

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
    return analyse(KERNEL, config, shape, device, KernelResources(**values), measured_us=measured_us)


def test_every_model_takes_part() -> None:
    found = analysis()
    assert found.breakdown is not None
    assert found.waves is not None
    assert found.waves.grid_blocks == 64 * 2 * 16
    assert found.budget is not None
    assert found.budget.shared_bytes == 131_072
    assert list(found.traffic) == list(found.rooflines) == ["standard", "v1", "v2", "v2_perfect_l2"]
    bytes_ = {name: traffic.total_bytes for name, traffic in found.traffic.items()}
    assert bytes_["v1"] > bytes_["v2"] > bytes_["v2_perfect_l2"]
    assert bytes_["v1"] > bytes_["standard"], "64 keys a pass are too few for the output's round trips at d = 128"
    assert found.block_intensity == 128
    assert found.to_json()["prediction"]["binding"] == found.breakdown.binding


def test_steps_down_are_those_of_the_kernel_s_choices() -> None:
    steps = steps_down(KERNEL, CONFIG, SHAPE, H200.limits)
    assert set(steps) == {"block_m 128→64", "block_n 64→32", "num_warps 8→4", "num_stages 3→2"}
    assert steps["num_stages 3→2"] == 131_072 - 2 * 64 * 128 * 2


def test_the_model_s_error_is_a_fraction_of_the_measured_time() -> None:
    assert analysis().model_error is None
    found = analysis(measured_us=1000.0)
    assert found.breakdown is not None
    assert found.model_error == pytest.approx(found.breakdown.total_us / 1000 - 1)
    slow, fast = (explain(analysis(measured_us=found.breakdown.total_us * factor)) for factor in (0.8, 1.25))
    assert "the model is 25.0 % above it" in slow
    assert "the model is 20.0 % below it" in fast
    assert "Nobody measured this config" in explain(analysis())


def test_the_words_name_what_binds_and_what_lifts_it() -> None:
    text = explain(analysis())
    assert "Bound by tensor (matrix products)" in text
    assert f"To lift tensor: {LIFTS['tensor']}" in text
    assert "run on tensor cores (wgmma)" in text
    assert "For 2 blocks you need ≤ 128 registers/thread (now 168) and ≤ 115,712 B of shared memory" in text
    assert "num_stages 3→2 gives 98,304 B" in text
    spilling = explain(analysis(spill_bytes=20_000, stack_bytes=20_000))
    assert f"To lift spill: {LIFTS['spill']}" in spilling


def test_terms_that_are_level_bind_together() -> None:
    text = explain(analysis(complete_shape(8192, 64), shared_bytes=65_536))
    assert "Bound by tensor (matrix products) and exp (exponentials of the softmax): alone each takes" in text
    assert "Exponentials take 1.00 times as long" in text


def test_every_term_of_the_model_has_words() -> None:
    terms = {name.removesuffix("_us") for name in CostBreakdown.__dataclass_fields__} - {"total"}
    assert set(TERMS) == set(LIFTS) == terms
    assert set(BACKWARD_TERMS) | set(BACKWARD_LIFTS) | set(DECODE_LIFTS) <= terms


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
    assert says in explain(analysis(shape, device_named(device), shared_bytes=40_000, tensor_cores=used))


def test_l2_is_named_where_the_theorem_is_too_pessimistic() -> None:
    config = replace(CONFIG, block_m=64)
    memory_us = analysis(config=config).traffic["v2"].total_bytes / 4.8e6
    text = explain(analysis(config=config, measured_us=memory_us / 4))
    assert f"would take {memory_us:,.1f} µs: at least 75 % of these bytes came from L2" in text
    assert "came from L2" not in explain(analysis(config=config, measured_us=memory_us * 1.01))
    assert "came from L2" not in explain(analysis(config=config)), "a prediction proves nothing"


def test_standard_attention_that_does_not_fit_is_told() -> None:
    assert "4 GiB a head" in explain(analysis(complete_shape(32768, 64, heads=64)))


def test_a_block_that_does_not_fit_is_explained_without_a_time() -> None:
    found = analysis(shared_bytes=300_000)
    assert (found.breakdown, found.waves) == (None, None)
    assert "0 blocks/SM: this kernel cannot be launched" in explain(found)
    assert found.to_json()["prediction"] is None


def test_an_unknown_rate_leaves_the_rest() -> None:
    found = analysis(device=replace(H200, memory_gbs=None))
    assert (found.breakdown, dict(found.rooflines)) == (None, {})
    text = explain(found)
    assert "No time is predicted: memory_gbs of NVIDIA H200 is unknown." in text
    assert "1 block/SM" in text


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

"""The roofline: known ridge points, prefill against decode, exponentials against products, waves."""

from dataclasses import replace

import pytest

from blocktune.kernels.base import precision
from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.cost.model import predict
from blocktune.tuner.cost.roofline import block_intensity, exp_over_products, ridge_point, roofline, waves_of
from blocktune.tuner.occupancy.calculator import Occupancy, occupancy
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses
from blocktune.tuner.traffic.model import standard_traffic, v2_traffic

pytestmark = pytest.mark.triton_free

H200, A100 = device_named("h200"), device_named("a100_sxm4_80")


def occupied(device: DeviceSpec) -> Occupancy:
    return occupancy(
        KernelResources(registers=128, shared_bytes=40_000, num_warps=4, tensor_cores=device.limits.mma), device.limits
    )


def decode(**sizes: int) -> AttentionShape:
    return replace(complete_shape(4096, 128, batch=8, heads=32, kv_heads=8), seqlen_q=1, **sizes)


def test_ridge_points_are_peak_over_bandwidth() -> None:
    assert ridge_point(H200) == pytest.approx(989.4e12 / 4.8e12, rel=1e-3)
    assert ridge_point(A100) == pytest.approx(312e12 / 2.039e12, rel=0.03)


def test_a_block_of_prefill_uses_every_byte_block_m_times() -> None:
    shape = complete_shape(4096, 128)
    assert block_intensity(shape, 128) == 128
    assert block_intensity(replace(shape, head_dim=64, head_dim_v=64), 128) == 128
    assert block_intensity(replace(shape, dtype="float32"), 128) == 64
    # 32 x 32 x 128 halves: 524,288 FLOP for 16 KiB of a key tile and its values
    assert block_intensity(shape, 32) == 524_288 / 16_384


def test_a_single_query_uses_every_byte_once() -> None:
    assert block_intensity(decode(), 64) == 1
    traffic = v2_traffic(decode(num_heads_kv=32), 64, 64)
    found = roofline(decode(num_heads_kv=32), traffic, H200)
    assert found.intensity == pytest.approx(1, rel=0.01)
    assert found.bound_by_memory
    assert found.to_json()["bound_by"] == "memory"
    assert found.least_us == pytest.approx(traffic.total_bytes / 4.8e6)


def test_prefill_that_reads_keys_once_is_bound_by_arithmetic_and_standard_attention_by_memory() -> None:
    shape = complete_shape(8192, 128)
    flash = roofline(shape, v2_traffic(shape, 128, 64, perfect_l2=True), H200)
    assert not flash.bound_by_memory
    assert flash.attainable_tflops == H200.tensor_tflops
    assert flash.least_us == pytest.approx(shape.flops / 989.4e6, rel=1e-3)
    standard = roofline(shape, standard_traffic(shape), H200)
    assert standard.bound_by_memory
    assert standard.intensity == pytest.approx(4 * 128 / 16, rel=0.05)
    assert standard.least_us > 5 * flash.least_us


@pytest.mark.parametrize(("allowed", "share"), [(True, 1 / 2), (False, 1 / 6)])
def test_float32_takes_one_or_three_products_at_half_the_rate(
    monkeypatch: pytest.MonkeyPatch, allowed: bool, share: float
) -> None:
    monkeypatch.setattr(precision, "allows_tf32", lambda: allowed)
    shape = complete_shape(8192, 128, dtype="fp32")
    found = roofline(shape, v2_traffic(shape, 128, 64, perfect_l2=True), H200)
    assert found.peak_tflops == pytest.approx(989.4 * share, rel=1e-3)


def test_an_unadvertised_peak_follows_from_the_clock() -> None:
    device = replace(H200, tensor_tflops=None)
    assert device.clock_mhz is not None
    assert ridge_point(device) == pytest.approx(4096 * 132 * device.clock_mhz * 1e6 / 4.8e12)


@pytest.mark.parametrize("missing", [{"memory_gbs": None}, {"tensor_tflops": None, "clock_mhz": None}])
def test_an_unknown_ceiling_is_named(missing: dict[str, None]) -> None:
    with pytest.raises(UsageError, match=f"its {next(iter(missing))} is unknown"):
        ridge_point(replace(H200, **missing))


@pytest.mark.parametrize(
    ("device", "dim", "ratio"), [(A100, 64, 0.5), (A100, 128, 0.25), (H200, 64, 1.0), (H200, 128, 0.5)]
)
def test_exponentials_take_this_share_of_the_products(device: DeviceSpec, dim: int, ratio: float) -> None:
    held = occupied(device)
    blocks = KernelConfig("flash_fwd", 64, 64, 4, 2)
    breakdown = predict(complete_shape(4096, dim), blocks, CompiledCode(held.resources, SharedAccesses()), device)
    assert exp_over_products(breakdown) == pytest.approx(ratio)


@pytest.mark.parametrize("causal", list(Causal))
def test_waves_count_a_block_for_every_query_tile_of_every_head(causal: Causal) -> None:
    held = occupied(H200)
    shape = complete_shape(1000, 64, batch=2, heads=3, causal=causal)
    waves = waves_of(shape, 128, held, H200.num_sms)
    assert waves.grid_blocks == 8 * 2 * 3
    assert waves.resident_blocks == held.blocks_per_sm * 132


def test_a_block_that_does_not_fit_has_no_waves() -> None:
    too_large = KernelResources(registers=128, shared_bytes=300_000, num_warps=4, tensor_cores="wgmma")
    with pytest.raises(UsageError, match="does not fit an SM"):
        waves_of(complete_shape(1000, 64), 128, occupancy(too_large, H200.limits), 132)

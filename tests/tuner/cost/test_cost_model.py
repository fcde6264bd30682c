"""The cost model: what it knows of the H200, and that every cause has its effect."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from blocktune.kernels.base.kernel import SoftmaxCost
from blocktune.kernels.base.loops import ForwardLoops
from blocktune.kernels.hardware.device import catalogue, device_named
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.cost.constants import CONSTANTS
from blocktune.tuner.cost.estimated_resources import estimated_resources
from blocktune.tuner.cost.model import (
    CostBreakdown,
    predict,
    predict_us,
)
from blocktune.tuner.cost.ranking import usefulness
from blocktune.tuner.cost.roofline import missing_rates
from blocktune.tuner.occupancy.calculator import occupancy
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses

pytestmark = pytest.mark.triton_free

H200 = device_named("h200")


class Kernel:
    """The part of AttentionKernel that the model asks; shared memory as Hopper's code has it."""

    loops = ForwardLoops()

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        del config
        return SoftmaxCost()

    def total_warps(self, config: KernelConfig) -> int:
        return config.num_warps

    def as_forward(self, config: KernelConfig, problem: AttentionShape) -> tuple[KernelConfig, AttentionShape]:
        return config, problem

    def second_launch(self, config: KernelConfig, problem: AttentionShape, limits: ComputeLimits) -> None:
        return None

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        del limits
        buffers = 2 * config.num_stages if config.num_stages > 1 else 1
        return (config.block_m + buffers * config.block_n) * shape.head_dim * shape.element_bytes

    launch_bytes = shared_bytes


KERNEL: Any = Kernel()


def shape(head_dim: int = 64, seqlen: int = 8192, causal: Causal = Causal.NONE) -> AttentionShape:
    """The usual problem of papers: 16384 tokens, 2048 elements over all heads."""
    heads = 2048 // head_dim
    return AttentionShape(
        batch=16384 // seqlen,
        num_heads=heads,
        num_heads_kv=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        head_dim_v=head_dim,
        causal=causal,
    )


def config(block_m: int, block_n: int, num_warps: int = 4, num_stages: int = 2) -> KernelConfig:
    return KernelConfig("flash_fwd", block_m, block_n, num_warps, num_stages)


def predicted(
    problem: AttentionShape,
    blocks: KernelConfig,
    device: Any = H200,
    softmax: SoftmaxCost | None = None,
    **changes: Any,
) -> CostBreakdown:
    resources = replace(estimated_resources(KERNEL, blocks, problem, device), **changes)
    shared = SharedAccesses() if resources.tensor_cores == "none" else None
    return predict(problem, blocks, CompiledCode(resources, shared), device, softmax)


def tflops(problem: AttentionShape, blocks: KernelConfig) -> float:
    return problem.flops / predicted(problem, blocks).total_us / 1e6


@pytest.mark.parametrize(
    ("head_dim", "causal", "blocks", "measured"),
    [
        # The best of 60 configs of a plain kernel on an H200, and what it reached in two runs.
        (64, Causal.NONE, config(64, 128, 4, 2), (430, 456)),
        (64, Causal.UPPER_LEFT, config(64, 64, 4, 3), (397, 429)),
        (128, Causal.NONE, config(128, 64, 4, 2), (505, 554)),
        (128, Causal.UPPER_LEFT, config(64, 64, 4, 3), (461, 508)),
    ],
)
def test_predict_is_near_what_an_h200_reached(
    head_dim: int, causal: Causal, blocks: KernelConfig, measured: tuple[int, int]
) -> None:
    rate = tflops(shape(head_dim, causal=causal), blocks)
    assert 0.8 * measured[0] < rate < 1.25 * measured[1]


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_predict_puts_measured_winners_into_the_first_quarter(head_dim: int, causal: Causal) -> None:
    problem = shape(head_dim, causal=causal)
    order = ranking(problem)
    winners = {64: (config(64, 128, 4, 2), config(64, 64, 4, 3)), 128: (config(128, 64, 4, 2), config(64, 64, 4, 3))}
    for winner in winners[head_dim]:
        assert order.index(winner) < len(order) / 4


def ranking(problem: AttentionShape) -> list[KernelConfig]:
    """All configs of the measured grid that fit, the fastest first."""
    grid = [
        config(block_m, block_n, num_warps, num_stages)
        for block_m in (64, 128, 256)
        for block_n in (64, 128, 256)
        for num_warps in (4, 8)
        for num_stages in (2, 3, 4)
    ]
    order = [(usefulness(KERNEL, blocks, problem, H200), i) for i, blocks in enumerate(grid)]
    return [grid[i] for time, i in sorted(order) if time < float("inf")]


def test_spills_cost_but_exclude_nothing() -> None:
    problem = shape(128)
    spilling = config(128, 128, 4, 2)
    assert estimated_resources(KERNEL, spilling, problem, H200).spill_bytes > 0
    order = ranking(problem)
    assert order.index(spilling) > len(order) / 3
    best = config(128, 64)
    times = [predicted(problem, best, spill_bytes=bytes_each).total_us for bytes_each in (0, 40, 400, 12_000)]
    assert times == sorted(times)
    assert times[3] > 5 * times[0]
    assert predicted(problem, best, spill_bytes=12_000).binding == "spill"


def test_resident_blocks_overlap_products_and_softmax() -> None:
    problem, blocks = shape(64), config(64, 64, num_stages=3)
    one, two, three = (predicted(problem, blocks, shared_bytes=bytes_) for bytes_ in (200_000, 110_000, 70_000))
    assert one.total_us > 1.2 * two.total_us
    assert two.total_us > 1.05 * three.total_us
    assert three.total_us > max(three.tensor_us, three.exp_us)
    overlapping = SoftmaxCost(products_overlap=True)
    assert predicted(problem, blocks, softmax=overlapping, shared_bytes=200_000).total_us < 0.9 * one.total_us


def test_a_softmax_with_fewer_instructions_is_faster() -> None:
    short = SoftmaxCost(instructions_per_score=3.5, rescales=False)
    problem, blocks = shape(64), config(64, 128)
    assert predicted(problem, blocks, softmax=short).arithmetic_us < predicted(problem, blocks).arithmetic_us
    assert predicted(problem, blocks, softmax=short).total_us < predicted(problem, blocks).total_us


def test_terms_follow_from_the_rates() -> None:
    problem = shape(128)
    breakdown = predicted(problem, config(128, 64))
    clock_mhz = 0.9 * 989.4e6 / (4096 * 132)
    assert breakdown.tensor_us == pytest.approx(problem.flops / (4096 * 132 * clock_mhz))
    scores = problem.batch * problem.num_heads * 8192 * 8192
    assert breakdown.exp_us == pytest.approx(scores / (16 * 132 * clock_mhz))
    assert breakdown.hbm_us == pytest.approx(4 * 16384 * 2048 * 2 / (0.92 * 4800e3))
    assert breakdown.binding == "tensor"
    assert breakdown.to_json() == asdict(breakdown) | {"binding": "tensor"}
    assert breakdown.tail_us >= 0


def test_causal_skips_half_but_not_for_free() -> None:
    full, causal = (predicted(shape(64, causal=mask), config(128, 64)) for mask in (Causal.NONE, Causal.UPPER_LEFT))
    assert 0.5 < causal.total_us / full.total_us < 0.6
    # With 512 keys the diagonal is a larger part, and more so for larger tiles.
    small, large = (predicted(shape(64, 512, Causal.UPPER_LEFT), config(m, m)) for m in (64, 128))
    assert large.tensor_us > 1.1 * small.tensor_us


def test_a_nearly_empty_last_wave_costs() -> None:
    problem = replace(shape(64, 8192), batch=1, num_heads=1, num_heads_kv=1)
    fits, overflows = (replace(problem, seqlen_q=64 * blocks) for blocks in (132, 133))
    assert predicted(overflows, config(64, 64)).total_us > 1.1 * predicted(fits, config(64, 64)).total_us


def test_more_stages_hide_the_latency_of_loads() -> None:
    problem = shape(64)
    one, two = (predicted(problem, config(64, 64, num_stages=stages), shared_bytes=70_000) for stages in (1, 2))
    assert one.total_us > 1.2 * two.total_us


COPYING = SoftmaxCost(rescales=False, products_overlap=True, copying_warps=4)


def test_a_second_buffer_is_no_more_than_half_of_what_a_third_one_is_worth() -> None:
    problem, blocks = shape(128), config(192, 64)
    times = [
        predicted(
            problem,
            replace(blocks, num_stages=stages),
            softmax=COPYING,
            num_warps=16,
            registers=128,
            shared_bytes=200_000,
            spill_bytes=0,
        ).total_us
        for stages in (1, 2, 3, 4)
    ]
    one, two, three, four = times
    assert one > 1.2 * two > 1.2 * three
    assert three >= four > 0.98 * three


def test_warpgroups_of_their_own_skip_what_is_right_of_their_diagonal() -> None:
    """Of 256 rows at the diagonal the first 64 see a quarter of the keys that the last see."""
    causal = shape(64, 512, Causal.UPPER_LEFT)
    ratio = {
        block_m: predicted(causal, config(block_m, 64, 8), softmax=COPYING, registers=128, num_warps=12).exp_us
        / predicted(causal, config(block_m, 64, 8)).exp_us
        for block_m in (64, 256)
    }
    assert ratio[64] == pytest.approx(1.0)
    assert ratio[256] == pytest.approx((1 + 2 + 3 + 4 + 5 + 6 + 7 + 8) / (4 * 4 + 4 * 8))


def test_few_keys_starve_the_score_product() -> None:
    problem = shape(128)
    per_key = [predicted(problem, config(64, block_n)).tensor_us for block_n in (32, 64, 128)]
    assert per_key[0] == pytest.approx(1.25 * per_key[1])  # half of the products reads 1.5 times as long
    assert per_key[1] == pytest.approx(per_key[2])


def test_blocks_that_start_anew_pay_where_they_are_short() -> None:
    longer, shorter = (
        predicted(shape(64, seqlen), config(64, 64, num_stages=3)).edge_us
        / predicted(shape(64, seqlen), config(64, 64, num_stages=3)).total_us
        for seqlen in (8192, 512)
    )
    assert shorter > 4 * longer


def test_a_warp_on_half_of_the_schedulers_takes_twice_as_long_alone() -> None:
    problem = replace(shape(64), batch=1, num_heads=1, num_heads_kv=1, seqlen_q=16)
    four, two = (
        predicted(problem, config(16, 64, warps), tensor_cores="mma", num_warps=warps).total_us for warps in (4, 2)
    )
    assert 1.0 < two / four < 2.0


def test_an_older_instruction_is_slower_and_none_much_slower() -> None:
    problem, blocks = shape(128), config(128, 64)
    wgmma, mma, none = (predicted(problem, blocks, tensor_cores=unit).tensor_us for unit in ("wgmma", "mma", "none"))
    assert wgmma < mma < none
    assert none > 10 * wgmma


def test_short_queries_are_bound_by_memory() -> None:
    decode = replace(shape(128), seqlen_q=1, batch=64)
    assert predicted(decode, config(64, 64)).binding in ("hbm", "latency", "edge", "tail")
    assert predicted(decode, config(64, 64)).total_us >= 2 * 64 * 16 * 8192 * 128 * 2 / 4800e3


def test_keys_beyond_l2_are_read_again() -> None:
    problem = replace(shape(128), batch=1, num_heads=1, num_heads_kv=1, seqlen_q=65_536, seqlen_k=65_536)
    waves = 4  # 1024 query tiles on 132 SMs with two blocks each
    keys_us = 2 * 65_536 * 128 * 2 / 4800e3
    small_l2 = replace(H200, l2_bytes=1 << 20)
    blocks = config(64, 64, num_stages=3)
    more = predicted(problem, blocks, small_l2).hbm_us - predicted(problem, blocks).hbm_us
    assert more == pytest.approx((waves - 1) * keys_us / 0.92)


@pytest.mark.parametrize("rate", ["tensor_flops_per_clock", "clock_mhz", "memory_gbs"])
def test_a_missing_rate_is_named(rate: str) -> None:
    unknown = replace(H200, **{rate: None})
    assert missing_rates(unknown) == (rate,)
    with pytest.raises(UsageError, match=f"NVIDIA H200: its {rate} is unknown"):
        predicted(shape(), config(64, 64), unknown)
    assert usefulness(KERNEL, config(64, 64), shape(), unknown) > 0


def test_a_config_that_does_not_fit_is_an_error_and_useless() -> None:
    too_large = config(256, 256, num_stages=4)
    with pytest.raises(UsageError, match="does not fit an SM of NVIDIA H200"):
        predicted(shape(128), too_large)
    assert usefulness(KERNEL, too_large, shape(128), H200) == float("inf")


def test_predict_us_is_the_total_of_the_breakdown() -> None:
    problem, blocks = shape(64), config(64, 128)
    resources = KernelResources(registers=168, shared_bytes=73_728, num_warps=4, tensor_cores="wgmma")
    breakdown = predict(problem, blocks, CompiledCode(resources, None), H200)
    assert predict_us(KERNEL, blocks, problem, H200, CompiledCode(resources, None)) == breakdown.total_us


def test_every_device_of_the_catalogue_orders_configs() -> None:
    blocks = [config(block_m, 64, num_warps) for block_m in (64, 128) for num_warps in (4, 8)]
    for entry in catalogue():
        device = device_named(entry.id)
        times = [usefulness(KERNEL, config, shape(64, 2048), device) for config in blocks]
        assert 0 < min(times) < float("inf"), entry.id


def test_warps_that_copy_leave_their_registers_to_those_that_compute() -> None:
    """Two warpgroups of three compute: their threads end up with 240 registers, of the 168 that all start with."""

    class Specialised(Kernel):
        def total_warps(self, config: KernelConfig) -> int:
            return config.num_warps + 4

        def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
            return SoftmaxCost(copying_warps=4)

    kernel: Any = Specialised()
    problem, large = shape(128), config(128, 128, 8, 2)
    resources = estimated_resources(kernel, large, problem, H200)
    assert (resources.num_warps, resources.registers, resources.spill_bytes) == (12, 168, 0)
    assert occupancy(resources, H200.limits).blocks_per_sm == 1
    assert estimated_resources(kernel, config(128, 128, 4, 2), problem, H200).spill_bytes > 0
    # to the model it is a block of eight warps, whose warpgroups wait for tiles but not for each other
    plain = replace(resources, num_warps=8)
    special_us = predict_us(kernel, large, problem, H200, CompiledCode(resources, None))
    assert special_us < 0.9 * predict(problem, large, CompiledCode(plain, None), H200).total_us


def test_threads_that_copy_need_instructions_for_addresses() -> None:
    problem, blocks = shape(128), config(64, 64)
    resources = KernelResources(registers=168, shared_bytes=73_728, num_warps=4, tensor_cores="wgmma")
    by_engine = predict(problem, blocks, CompiledCode(resources, None), H200)
    by_threads = predict(problem, blocks, CompiledCode(resources, None), H200, SoftmaxCost(address_instructions=6.0))
    pieces, scores = 64 * 2 * 128 * 2 / 16, 64 * 64
    others = scores * 5.5 + 64 * 128 + 64 * CONSTANTS.row_operations
    ratio = (others + 6 * pieces) / others
    assert by_threads.arithmetic_us == pytest.approx(by_engine.arithmetic_us * ratio)

"""The cost model of configs with more than one launch: merges, second passes and sums in memory."""

from dataclasses import replace
from typing import Any

import pytest

from blocktune.kernels.base.kernel import SoftmaxCost
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import Direction
from blocktune.tuner.cost.constants import CONSTANTS
from blocktune.tuner.cost.estimated_resources import estimated_code
from blocktune.tuner.cost.iterations import ADDED_BYTES_PER_CLOCK
from blocktune.tuner.cost.model import (
    parts_of,
    predict,
    predict_launches,
    predict_second,
    predict_us,
)
from blocktune.tuner.traffic.by_kernel import traffic_of
from blocktune.tuner.traffic.launches import Passes
from tests.tuner.cost.test_cost_model import H200, KERNEL, config, shape

pytestmark = pytest.mark.triton_free


def test_a_merge_of_shares_is_a_launch_more() -> None:
    kernel: Any = get_kernel("flash_decode")
    problem = replace(shape(128, 8192), batch=1, num_heads=32, num_heads_kv=8, seqlen_q=1)
    blocks = kernel.default_config(problem, H200.limits)
    code = estimated_code(kernel, blocks, problem, H200)
    folded_config, folded = kernel.as_forward(blocks, problem)
    assert parts_of(folded, problem) == blocks.parameters["splits"] > 1
    alone = predict(folded, folded_config, code, H200)
    early = predict_us(kernel, blocks, problem, H200, code)
    waiting = KernelConfig.of("flash_decode", blocks.parameters | {"overlap": 0})
    late = predict_us(kernel, waiting, problem, H200, code)
    assert early - late == pytest.approx(CONSTANTS.overlapped_merge_us - CONSTANTS.merge_us, abs=1e-9)
    moved = predict(folded, folded_config, code, H200, parts=2)
    assert moved.hbm_us > alone.hbm_us
    assert moved.total_us - alone.total_us > CONSTANTS.merge_us
    inside = predict(folded, folded_config, code, H200, SoftmaxCost(merges_inside=True), 2)
    assert moved.total_us - inside.total_us == pytest.approx(CONSTANTS.merge_us - CONSTANTS.inner_merge_us, abs=1e-9)
    assert parts_of(problem, problem) == 1


def test_splits_win_by_more_than_double_where_64_queries_leave_most_of_the_gpu_idle() -> None:
    """Measured on an H200: 39 us packed and split, 91 us without."""
    problem = replace(shape(128, 8192), batch=1, num_heads=32, num_heads_kv=8, seqlen_q=64)

    def default_us(name: str) -> float:
        kernel = get_kernel(name)
        assert kernel.unsupported(problem, H200.limits) is None
        blocks = kernel.default_config(problem, H200.limits)
        return predict_us(kernel, blocks, problem, H200, estimated_code(kernel, blocks, problem, H200))

    assert default_us("flash_decode") == pytest.approx(39, rel=0.2)
    assert default_us("flash_fwd_hopper") > 2 * default_us("flash_decode")


def test_a_backward_in_two_passes_takes_as_long_as_both() -> None:
    kernel, problem = get_kernel("flash_bwd_split"), replace(shape(128, 2048), direction=Direction.BACKWARD)
    blocks = kernel.default_config(problem, H200.limits)
    code = estimated_code(kernel, blocks, problem, H200)
    owner, folded = kernel.as_forward(blocks, problem)
    cost = kernel.softmax_cost(blocks)
    keys = predict(folded, owner, code, H200, cost)
    queries = predict_second(kernel, blocks, problem, H200)
    assert queries is not None
    both = keys.followed_by(queries)
    assert both.total_us == keys.total_us + queries.total_us
    found = predict_launches(kernel, blocks, problem, H200, code)
    assert found == both.beside(found.beside_us)
    moved = traffic_of(kernel, blocks, problem, perfect_l2=True)
    assert isinstance(moved, Passes)
    delta_us = sum(one.total_bytes for one in moved.passes if one.name == "delta") / 4.8e6
    assert delta_us < found.beside_us < delta_us + 10  # and a launch
    assert both.tensor_us == keys.tensor_us + queries.tensor_us
    assert queries.tensor_us == pytest.approx(0.75 * keys.tensor_us, rel=0.1)  # three products after four
    narrow = KernelConfig.of(kernel.name, blocks.parameters | {"dq_block_m": 32, "dq_block_n": 32})
    assert predict_us(kernel, narrow, problem, H200, code) > 1.25 * both.total_us


def test_sums_in_memory_cost_what_is_added() -> None:
    problem, blocks = shape(128, 2048), config(64, 64)
    code = estimated_code(KERNEL, blocks, problem, H200)
    alone, adding = (predict(problem, blocks, code, H200, SoftmaxCost(adds_walked=adds)) for adds in (False, True))
    added_bytes = 8 * 16 * (2048 // 64) * 2048 * 128 * 4  # every key once for every tile of queries, in float32
    clock_mhz = CONSTANTS.sustained_clock * H200.tensor_tflops * 1e6 / (H200.tensor_flops_per_clock * H200.num_sms)
    longer_us = added_bytes / ADDED_BYTES_PER_CLOCK / H200.num_sms / clock_mhz
    assert adding.l2_us - alone.l2_us == pytest.approx(longer_us)
    assert adding.total_us - alone.total_us == pytest.approx(longer_us, rel=0.05)

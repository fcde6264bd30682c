"""The ladder of a backward: its steps, predictions without a GPU, and a climb on the CPU with a fake clock."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from blocktune.kernels.hardware.device import current_device, device_named
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.compare.ladder import Ladder, climb, listed_steps
from blocktune.tuner.compare.ladder_ideas import IDEAS
from blocktune.tuner.compare.ladder_steps import bytes_of, kernels_of, predicted_standard_us
from blocktune.tuner.compare.peers import standard_compute
from blocktune.tuner.compile_server.farm import CompileFarm
from blocktune.tuner.correctness.checks_of_shape import questions_of
from blocktune.tuner.measure.clock import CudaClock
from blocktune.tuner.traffic.backward import standard_backward_traffic
from tests.support.fakes.ladder_fakes import H200, SMALL, Compiler

STEPS = list(IDEAS[Direction.BACKWARD])
LONG = replace(complete_shape(8192, 64), direction=Direction.BACKWARD)
SHORT = replace(SMALL, direction=Direction.BACKWARD)


def test_the_steps_are_those_of_backward_kernels_and_the_plain_ones_share_their_blocks() -> None:
    steps = {step.name: step.config for step in listed_steps(LONG, H200.limits, ())}
    assert [*STEPS[:2], *steps] == ["standard", "efficient", "two_passes", "one_pass", "tuned", "hopper"]
    two, one = steps["two_passes"], steps["one_pass"]
    assert two is not None
    assert one is not None
    assert (two.kernel, one.kernel) == ("flash_bwd_split", "flash_bwd_fused")
    assert (two.block_m, two.block_n, two.num_warps) == (one.block_m, one.block_n, one.num_warps)
    assert one.parameters["reduce"] == 0, "by atomic additions, as it was first written"
    assert [kernel.direction for kernel in kernels_of("hopper", Direction.BACKWARD)] == [Direction.BACKWARD]


def test_a_known_config_is_taken_by_the_tuned_steps_alone() -> None:
    fused = get_kernel("flash_bwd_fused").default_config(LONG, H200.limits)
    steps = {step.name: step.config for step in listed_steps(LONG, H200.limits, (fused,))}
    assert steps["tuned"] == fused != steps["one_pass"]


def test_a_prediction_has_times_gains_and_reasons() -> None:
    ladder = climb(LONG, H200, compiler=Compiler())
    assert [step.name for step in ladder.steps] == STEPS
    assert "no model predicts it" in ladder.step("efficient").problem
    two, one, hopper = (ladder.step(name) for name in ("two_passes", "one_pass", "hopper"))
    assert ladder.to_json()["origin"] == "predicted"
    assert all(step.predicted_us for step in ladder.steps if not step.problem)
    assert two.over_before is None, "no band of PyTorch's operations is known"
    assert one.over_before == pytest.approx(two.predicted_us / one.predicted_us)  # type: ignore[operator]
    assert "device memory: " in two.why
    assert "5 matrix products for every pair of tiles instead of 7; dQ is added to sums in device memory" in one.why
    assert "a product runs during the softmax" in hopper.why
    assert [step.over_v2 for step in ladder.steps] == [None] * len(STEPS)


def test_standard_attention_moves_its_matrices_and_takes_at_least_its_bytes_and_products() -> None:
    moved = standard_backward_traffic(LONG).total_bytes
    assert bytes_of(LONG, None).counted == moved > 7 * 2 * 32 * 8192**2 * 4
    predicted = predicted_standard_us(LONG, H200)
    assert predicted >= moved / (H200.memory_gbs * 1e3) * 0.999
    assert predicted >= LONG.flops / (H200.tensor_tflops * 1e6)


def test_a_card_without_tensor_cores_for_triton_has_no_hopper_step() -> None:
    shape = replace(complete_shape(1024, 64, dtype="fp16"), direction=Direction.BACKWARD)
    ladder = climb(shape, device_named("rtx2070"), compiler=Compiler(tensor_cores="none"))
    assert "wgmma" in ladder.step("hopper").problem
    assert ladder.step("two_passes").problem == ""


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("lengths", [(48, 48), (40, 70), (70, 40)])
def test_standard_attention_has_the_right_gradients(causal: Causal, lengths: tuple[int, int]) -> None:
    shape = AttentionShape(
        batch=2, num_heads=4, num_heads_kv=2, seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=16, head_dim_v=32,
        dtype="float32", causal=causal, direction=Direction.BACKWARD,
    )  # fmt: skip
    for question in questions_of(shape, device="cpu", seed=0):
        gradients = standard_compute(shape, H200, question)(question.q, question.k, question.v)
        assert question.problem(gradients) is None


def test_a_climb_checks_the_gradients_and_times_equal_configs_once(on_the_cpu: Callable[..., Ladder]) -> None:
    ladder = on_the_cpu(SHORT)
    assert ladder.measured
    timed = [step for step in ladder.steps if step.timing]
    assert [step.name for step in timed] == ["standard", "two_passes", "one_pass", "tuned", "hopper"]
    assert "RuntimeError" in ladder.step("efficient").problem, "it needs a GPU"
    assert ladder.step("tuned").config == ladder.step("two_passes").config
    times = [100, 50, 100 / 3, 50, 25]
    assert [step.timing.median_us for step in timed if step.timing] == pytest.approx(times)
    gains = [before / after for before, after in itertools.pairwise(times)]
    assert [step.over_before for step in timed[1:]] == pytest.approx(gains)


def test_wrong_gradients_are_listed(on_the_cpu: Callable[..., Ladder]) -> None:
    ladder = on_the_cpu(SHORT, bind=lambda config, shape: lambda *tensors: [each.fill_(1.0) for each in tensors[6:9]])
    for name in ("two_passes", "hopper"):
        assert ladder.step(name).problem.startswith("WrongResultError: relative error")
        assert ladder.step(name).timing is None
    assert ladder.step("standard").timing is not None


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_every_step_is_right_and_timed_on_this_gpu(causal: bool) -> None:
    device = current_device()
    shape = complete_shape(1024, 64, batch=2, heads=16, causal=causal)
    shape = replace(shape, direction=Direction.BACKWARD)
    with CompileFarm(need_code=True) as farm:
        ladder = climb(shape, device, compiler=farm, clock=CudaClock())
    for step in ladder.steps:
        kernels = kernels_of(step.name, Direction.BACKWARD)
        able = not kernels or any(kernel.unsupported(shape, device.limits) is None for kernel in kernels)
        assert (step.timing is not None) == able, (step.name, step.problem)
    standard, two = (ladder.step(name).timing for name in ("standard", "two_passes"))
    assert standard is not None
    assert two is not None
    assert two.median_us < standard.median_us

"""Block-sparse attention compiled on a GPU: right, in any default config, and in time to the density of the mask."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import Causal, Direction
from tests.support.attention.sparse_problems import (
    BACKWARD,
    FORWARD,
    Problem,
    backward_config,
    check_backward,
    check_forward,
    forward_config,
    large,
    random_mask,
)
from tests.support.triton_modes import runs

pytestmark = [
    runs,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", [0, 1, 2])
@pytest.mark.parametrize("tile", [(64, 64, 4), (128, 64, 8), (64, 32, 4)])
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bfloat16"), (128, "float16"), (80, "bfloat16")])
def test_forward_compiled(head_dim: int, dtype: str, causal: Causal, tile: tuple[int, int, int], schedule: int) -> None:
    shape = large(head_dim, dtype, causal)
    mask = random_mask(shape, 0.3, max(tile), 128, batch=2, heads=8)
    mask.mask[:, 3, 2] = False
    check_forward(Problem(shape, mask, "bshd"), forward_config(*tile, 3, schedule))


@pytest.mark.gpu
@pytest.mark.parametrize(("block", "tiles", "warps"), [(64, (64, 64, 64, 64), 8), (128, (128, 64, 64, 128), 8)])
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bfloat16"), (128, "float16"), (80, "bfloat16")])
def test_backward_compiled(
    head_dim: int, dtype: str, causal: Causal, block: int, tiles: tuple[int, int, int, int], warps: int
) -> None:
    shape = large(head_dim, dtype, causal)
    mask = random_mask(shape, 0.3, block, block, batch=2, heads=8)
    mask.mask[:, 3, 2] = False
    problem, config = Problem(shape, mask, "bshd"), backward_config(*tiles, warps)
    for first, second in zip(check_backward(problem, config), problem.backward(config), strict=True):
        assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_default_configs_run(head_dim: int) -> None:
    limits = limits_for(torch.cuda.get_device_capability())
    shape = large(head_dim, "bfloat16", Causal.UPPER_LEFT)
    problem = Problem(shape, random_mask(shape, 0.5, 64, 64))
    check_forward(problem, FORWARD.default_config(shape, limits))
    check_backward(problem, BACKWARD.default_config(replace(shape, direction=Direction.BACKWARD), limits))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_time_follows_density(head_dim: int, record_property: Any) -> None:
    """A quarter of the blocks takes at most a third of the dense kernel's time, both with their best tiles here. The
    fastest dense kernel of all, which is another one, is only compared and told."""
    sizes = {"num_heads": 16, "num_heads_kv": 16, "seqlen_q": 8192, "seqlen_k": 8192}
    shape = large(head_dim, "bfloat16", Causal.NONE, **sizes)
    problem = Problem(shape, random_mask(shape, 0.25, 128, 128))
    out = torch.empty_like(problem.q)
    tensors = (problem.q, problem.k, problem.v, out, None, problem.scale)
    dense_kernel, dense_shape = get_kernel("flash_fwd"), replace(shape, features=Features())
    dense = dense_kernel.bind(dense_kernel.default_config(dense_shape, limits_for((9, 0))), dense_shape)
    configs = [forward_config(*tile, schedule=2) for tile in ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3))]
    extras = Extras(block_mask=problem.mask)
    sparse = min(milliseconds(FORWARD.bind(config, shape), *tensors, extras) for config in configs)
    ratio = milliseconds(dense, *tensors) / sparse
    record_property("speed_up_at_density", f"{ratio:.2f} at {problem.mask.density:.3f}")
    fastest = kernels_for(dense_shape, current_device().limits)[0]
    best = milliseconds(fastest.bind(fastest.default_config(dense_shape, limits_for((9, 0))), dense_shape), *tensors)
    print(f"d{head_dim}: {ratio:.2f} x flash_fwd, {best / sparse:.2f} x {fastest.name}")
    assert ratio >= 3 * 0.25 / problem.mask.density


def milliseconds(launch: Any, *arguments: Any) -> float:
    """The median of 20 launches' times."""
    times = []
    for _ in range(23):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch(*arguments)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[3:])[10]

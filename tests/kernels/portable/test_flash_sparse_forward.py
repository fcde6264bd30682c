"""Block-sparse attention against float64 over the same mask, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import Causal, Direction
from tests.support.attention.sparse_problems import (
    FORWARD,
    Problem,
    check_forward,
    forward_config,
    random_mask,
    shape_of,
)
from tests.support.triton_modes import DEVICE, runs

pytestmark = [
    pytest.mark.interpreted,
    runs,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]


@pytest.mark.few(8)
@pytest.mark.parametrize("schedule", [0, 1, 2])
@pytest.mark.parametrize("density", [0.2, 0.6])
@pytest.mark.parametrize("causal", Causal)
def test_forward(density: float, schedule: int, causal: Causal) -> None:
    shape = shape_of(seqlen_q=96, seqlen_k=128, causal=causal)
    check_forward(Problem(shape, random_mask(shape, density)), forward_config(schedule=schedule))


@pytest.mark.few(6)
@pytest.mark.parametrize("schedule", [0, 2])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 77), (70, 33), (40, 100)])
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
def test_forward_ragged(schedule: int, seqlen_q: int, seqlen_k: int, causal: Causal) -> None:
    shape = shape_of(num_heads=1, num_heads_kv=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal)
    check_forward(Problem(shape, random_mask(shape, 0.7)), forward_config(schedule=schedule))


@pytest.mark.parametrize(
    ("block_q", "block_k", "block_m", "block_n"), [(64, 32, 16, 32), (16, 64, 16, 16), (32, 16, 32, 16)]
)
def test_forward_tiles_within_blocks(block_q: int, block_k: int, block_m: int, block_n: int) -> None:
    shape = shape_of(causal=Causal.UPPER_LEFT, dtype="float32")
    mask = random_mask(shape, 0.5, block_q, block_k)
    check_forward(Problem(shape, mask), forward_config(block_m, block_n))


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("per_batch", [False, True])
def test_forward_grouped_heads_with_their_own_masks(layout: str, per_batch: bool) -> None:
    shape = shape_of(batch=2, num_heads=4, num_heads_kv=2, seqlen_q=64, seqlen_k=65)
    mask = random_mask(shape, 0.5, batch=2 if per_batch else 1, heads=4)
    check_forward(Problem(shape, mask, layout), forward_config(schedule=2))


@pytest.mark.parametrize("causal", Causal)
def test_all_blocks_give_the_dense_kernel_s_bits(causal: Causal) -> None:
    shape = shape_of(seqlen_q=90, seqlen_k=110, causal=causal)
    problem = Problem(shape, random_mask(shape, 1.1, 64, 64))
    config = forward_config(64, 32)
    out, lse = problem.forward(config)
    dense_out, dense_lse = torch.empty_like(out), torch.empty_like(lse)
    dense = get_kernel("flash_fwd").bind(replace(config, kernel="flash_fwd"), replace(shape, features=Features()))
    dense(problem.q, problem.k, problem.v, dense_out, dense_lse, problem.scale)
    assert torch.equal(out, dense_out)
    assert torch.equal(lse, dense_lse)


def test_forward_of_rows_without_blocks() -> None:
    shape = shape_of()
    mask = random_mask(shape, 0.6)
    mask.mask[:, :, 1] = False
    out, lse = check_forward(Problem(shape, mask), forward_config(schedule=2))
    assert (out[:, :, 32:64] == 0).all()
    assert lse[:, :, 32:64].isneginf().all()


@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_an_empty_mask_gives_zeros(schedule: int) -> None:
    shape = shape_of(causal=Causal.UPPER_LEFT, seqlen_k=90)
    out, lse = Problem(shape, random_mask(shape, 0.0)).forward(forward_config(schedule=schedule))
    assert (out == 0).all()
    assert lse.isneginf().all()


def test_scores_that_grow_past_the_fixed_reference() -> None:
    shape = shape_of(seqlen_k=128)
    problem = Problem(shape, random_mask(shape, 0.7), growth=200.0)
    check_forward(problem, forward_config(schedule=2))


def test_tiles_must_divide_the_mask_s_blocks() -> None:
    shape = shape_of()
    problem = Problem(shape, random_mask(shape, 0.5))
    with pytest.raises(UsageError, match=r"`block_m` must divide the mask's blocks, but got block_m=64 for blocks of"):
        problem.forward(forward_config(block_m=64))
    with pytest.raises(UsageError, match=r"`block_n` must divide the mask's blocks, but got block_n=64"):
        problem.forward(forward_config(block_n=64))


def test_masks_of_another_shape_are_told() -> None:
    shape = shape_of()
    with pytest.raises(UsageError, match=r"must have \(3, 3\) blocks, but got \(3, 4\)"):
        Problem(shape, random_mask(shape_of(seqlen_k=128), 0.5)).forward(forward_config())
    with pytest.raises(UsageError, match="heads=3"):
        Problem(shape, random_mask(shape, 0.5, heads=3)).forward(forward_config())
    launch = FORWARD.bind(forward_config(), shape)
    with pytest.raises(UsageError, match="must be a BlockMask, but got NoneType"):
        launch(*[torch.zeros(1, device=DEVICE)] * 5, 1.0, Extras())


def test_only_sparse_shapes_are_served() -> None:
    limits = limits_for((9, 0))
    assert FORWARD.unsupported(shape_of(), limits) is None
    assert "needs a block mask" in str(FORWARD.unsupported(shape_of(features=Features()), limits))
    assert "backward" in str(FORWARD.unsupported(shape_of(direction=Direction.BACKWARD), limits))

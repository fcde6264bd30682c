"""Gradients of block-sparse attention against float64 autograd over the same mask, in Triton's interpreter."""

import pytest
import torch

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import Causal
from tests.support.attention.sparse_problems import Problem, backward_config, check_backward, random_mask, shape_of
from tests.support.triton_modes import DEVICE, runs

pytestmark = [
    pytest.mark.interpreted,
    runs,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]


@pytest.mark.few(4)
@pytest.mark.parametrize("density", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("causal", Causal)
def test_backward(density: float, causal: Causal) -> None:
    shape = shape_of(seqlen_q=96, seqlen_k=128, causal=causal)
    check_backward(Problem(shape, random_mask(shape, density)), backward_config())


@pytest.mark.few(5)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 77), (70, 33), (40, 100)])
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT, Causal.LOWER_RIGHT])
def test_backward_ragged(seqlen_q: int, seqlen_k: int, causal: Causal) -> None:
    shape = shape_of(num_heads=1, num_heads_kv=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal)
    check_backward(Problem(shape, random_mask(shape, 0.8)), backward_config())


@pytest.mark.parametrize(
    ("blocks", "tiles"), [((64, 32), (16, 32, 64, 16)), ((16, 64), (16, 16, 16, 64)), ((32, 16), (32, 16, 32, 16))]
)
def test_backward_tiles_within_blocks(blocks: tuple[int, int], tiles: tuple[int, int, int, int]) -> None:
    shape = shape_of(causal=Causal.UPPER_LEFT, dtype="float32")
    check_backward(Problem(shape, random_mask(shape, 0.5, *blocks)), backward_config(*tiles))


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("per_batch", [False, True])
def test_backward_of_grouped_heads_with_their_own_masks(layout: str, per_batch: bool) -> None:
    shape = shape_of(batch=2, num_heads=4, num_heads_kv=2, seqlen_q=64, seqlen_k=65, head_dim_v=32)
    mask = random_mask(shape, 0.5, batch=2 if per_batch else 1, heads=4)
    check_backward(Problem(shape, mask, layout), backward_config())


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
def test_rows_and_columns_without_blocks_have_no_gradients(causal: Causal) -> None:
    shape = shape_of(causal=causal)
    mask = random_mask(shape, 0.9)
    mask.mask[:, :, 1] = False
    mask.mask[:, :, :, 2] = False
    dq, dk, dv = check_backward(Problem(shape, mask), backward_config())
    assert (dq[:, :, 32:64] == 0).all()
    assert (dk[:, :, 64:] == 0).all()
    assert (dv[:, :, 64:] == 0).all()


def test_a_gradient_of_one_value_for_all() -> None:
    """As of `out.sum()`: a tensor whose strides are all zero."""
    shape = shape_of()
    problem = Problem(shape, random_mask(shape, 0.5))
    problem.dout = torch.ones(1, 1, 1, 1, dtype=problem.q.dtype, device=DEVICE).expand(problem.dout.shape)
    check_backward(problem, backward_config())


def test_backward_tiles_must_divide_the_mask_s_blocks() -> None:
    shape = shape_of()
    problem = Problem(shape, random_mask(shape, 0.5))
    with pytest.raises(UsageError, match="`kv_block_m` must divide the mask's blocks, but got kv_block_m=64"):
        problem.backward(backward_config(kv_block_m=64))
    with pytest.raises(UsageError, match="`kv_block_n` must divide the mask's blocks, but got kv_block_n=64"):
        problem.backward(backward_config(kv_block_n=64))

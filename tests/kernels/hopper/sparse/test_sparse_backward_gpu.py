"""Gradients of the Hopper backward under a block mask on a GPU, against float64."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.sparse.kernel import FlashBackwardHopperSparse
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from tests.support.attention.sparse_problems import Problem, check_backward, large, random_mask
from tests.support.hopper_gpu import skip_elsewhere

KERNEL = FlashBackwardHopperSparse()
ORDERED = Features.parse("block_sparse deterministic")


def default(asked: AttentionShape, **changes: int) -> KernelConfig:
    shape = replace(asked, direction=Direction.BACKWARD)
    return KernelConfig.of(KERNEL.name, dict(KERNEL.default_config(shape, limits_for((9, 0))).parameters) | changes)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(("block_q", "block_k"), [(64, 64), (64, 128), (128, 64), (128, 128), (256, 512)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients(head_dim: int, block_q: int, block_k: int, causal: Causal) -> None:
    """Ragged lengths, a mask of every query head, one that few blocks are left of, and both layouts."""
    skip_elsewhere(KERNEL)
    for density, heads, layout in ((0.1, 8, "bhsd"), (0.5, 1, "bshd")):
        asked = large(head_dim, "bfloat16", causal, seqlen_q=1000)
        mask = random_mask(asked, density, block_q, block_k, heads=heads)
        check_backward(Problem(asked, mask, layout), default(asked))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_a_fixed_order_gives_equal_bits(head_dim: int, causal: Causal) -> None:
    skip_elsewhere(KERNEL)
    for parts, batch in product((1, 4), (1, 2)):
        asked = large(head_dim, "float16", causal, features=ORDERED)
        problem = Problem(asked, random_mask(asked, 0.4, 64, 64, batch=batch, heads=8))
        first = check_backward(problem, default(asked, group_parts=parts))
        for _ in range(5):
            assert all(map(torch.equal, first, check_backward(problem, default(asked, group_parts=parts))))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_and_queries_that_nobody_sees_have_no_gradients(head_dim: int) -> None:
    skip_elsewhere(KERNEL)
    asked = large(head_dim, "bfloat16", Causal.NONE)
    mask = random_mask(asked, 0.9, 128, 128)
    mask.mask[:, :, 2] = False
    mask.mask[:, :, :, 3] = False
    dq, dk, dv = check_backward(Problem(asked, mask), default(asked))
    assert (dq[:, :, 256:384] == 0).all()
    assert (dk[:, :, 384:512] == 0).all()
    assert (dv[:, :, 384:512] == 0).all()

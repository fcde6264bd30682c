"""The Hopper backward under a block mask: its lists, its rules, and its own source on the CPU (gluon_machine.py)."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.sparse.kernel import FlashBackwardHopperSparse
from blocktune.kernels.hopper.sparse.lists import list_strides, walk_lists
from blocktune.kernels.registry import default_kernel
from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from tests.kernels.hopper.backward.test_flash_bwd_hopper_source import gradients_of
from tests.support.attention.sparse_problems import GRADIENT_TOLERANCE, Problem, assert_near, random_mask, shape_of
from tests.support.compiles.measures import compile_resources
from tests.support.triton_modes import TRITON

KERNEL, HOPPER = FlashBackwardHopperSparse(), limits_for((9, 0))
NO, UPPER_LEFT, LOWER_RIGHT = Causal


def shape(
    seqlen_q: int = 300, seqlen_k: int = 450, head_dim: int = 128, order: str = "", **changes: Any
) -> AttentionShape:
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim, "direction": Direction.BACKWARD}
    return shape_of(**sizes | {"features": Features.parse(f"block_sparse {order}")} | changes)


def check(asked: AttentionShape, mask: BlockMask, programs: int = 3) -> list[torch.Tensor]:
    """Compare the gradients with those of float64, and return them."""
    problem = Problem(asked, mask)
    config = KernelConfig.of(KERNEL.name, dict(KERNEL.default_config(asked, HOPPER).parameters) | {"group_parts": 1})
    out, lse, *expected = problem.expected()
    inputs = [problem.q, problem.k, problem.v, out.half(), lse.float(), problem.dout]
    found = gradients_of(asked, config, inputs, Extras(block_mask=mask), programs)
    for got, wanted in zip(found, expected, strict=True):
        assert_near(got, wanted, GRADIENT_TOLERANCE[asked.dtype])
    return found


# ---- lists


def test_lists_name_masked_blocks_first_and_say_which_half_of_the_keys_is_hidden() -> None:
    asked = shape(256, 200, num_heads=1, num_heads_kv=1)
    seen = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0]]).bool()  # [64 queries, 64 keys]
    mask = BlockMask(64, 64, seen[None, None])
    lists = walk_lists(mask, asked)
    first, second = lists[0, 0].tolist()
    # two blocks see a part of the first 128 keys; 128 is the third block's first query, which sees all of them
    assert first[:6] == [2, 4, 64 + 2, 192 + 1, 0, 128]
    # keys end at 200, so that every block of the second tile is masked
    assert second[:3] == [1, 1, 0 + 2]
    assert first[6:] == [0, 0, 0, 0]
    assert second[6:] == [1, 1, 1, 1]
    assert walk_lists(mask, asked) is lists
    assert list_strides(mask, lists) == (0, 0, 10)


def test_a_tile_that_nobody_sees_walks_a_hidden_block_and_takes_no_turn() -> None:
    asked = shape(128, 256, num_heads=1, num_heads_kv=1)
    lists = walk_lists(BlockMask(128, 128, torch.tensor([[[[True, False]]]])), asked)
    assert lists[0, 0].tolist() == [[0, 2, 0, 64, 0, 0], [1, 1, 3, 67, -1, -1]]


def test_a_diagonal_masks_what_it_cuts_and_leaves_out_what_it_hides() -> None:
    asked = shape(256, 256, causal=UPPER_LEFT, num_heads=1, num_heads_kv=1)
    first, second = walk_lists(BlockMask(256, 256, torch.ones(1, 1, 1, 1).bool()), asked)[0, 0].tolist()
    assert first[:6] == [2, 4, 0 + 2, 64, 128, 192]
    assert second[:4] == [2, 2, 128 + 2, 192]


@pytest.mark.parametrize(("blocks", "name"), [((32, 128), "block_q"), ((128, 32), "block_k")])
def test_blocks_that_tiles_do_not_make_up_are_refused(blocks: tuple[int, int], name: str) -> None:
    asked = shape()
    with pytest.raises(UsageError, match=f"`{name}` of the BlockMask must be a multiple of 64"):
        walk_lists(random_mask(asked, 0.5, *blocks), asked)


# ---- rules


def test_it_serves_masks_of_narrow_heads_first() -> None:
    served = default_kernel(shape(), HOPPER)
    assert served is not None
    assert served.name == KERNEL.name
    assert "heads up to 128" in str(KERNEL.unsupported(shape(head_dim=192), HOPPER))
    assert "needs a block mask" in str(KERNEL.unsupported(replace(shape(), features=Features()), HOPPER))
    config = KernelConfig.of(KERNEL.name, dict(KERNEL.default_config(shape(), HOPPER).parameters) | {"persistent": 0})
    assert "`persistent` 1" in KERNEL.violations(config, shape(), HOPPER)[0]


@pytest.mark.few(2)
@pytest.mark.parametrize("order", ["", "deterministic"])
@pytest.mark.parametrize("causal", [NO, LOWER_RIGHT])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_compiles_without_a_gpu(head_dim: int, causal: Causal, order: str) -> None:
    asked = shape(1024, 1024, head_dim, order, causal=causal, dtype="bfloat16")
    found = compile_resources(KERNEL, KERNEL.default_config(asked, HOPPER), asked, (9, 0))
    assert found.registers == 168
    assert found.spill_bytes <= (160 if TRITON < (3, 9) else 460)


# ---- gradients


@pytest.mark.few(6)
@pytest.mark.parametrize("order", ["", "deterministic"])
@pytest.mark.parametrize("causal", [NO, UPPER_LEFT, LOWER_RIGHT])
@pytest.mark.parametrize(("block_q", "block_k"), [(64, 64), (64, 128), (128, 64), (256, 128)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients(head_dim: int, block_q: int, block_k: int, causal: Causal, order: str) -> None:
    asked = shape(head_dim=head_dim, order=order, causal=causal)
    check(asked, random_mask(asked, 0.5, block_q, block_k, heads=2))


@pytest.mark.few(2)
@pytest.mark.parametrize("order", ["", "deterministic"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_groups_whose_heads_have_masks_of_their_own(head_dim: int, order: str) -> None:
    asked = shape(head_dim=head_dim, order=order, num_heads=4, num_heads_kv=2, batch=2)
    check(asked, random_mask(asked, 0.4, 64, 128, batch=2, heads=4))


@pytest.mark.few(2)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_fixed_order_is_the_same_however_many_blocks_there_are(head_dim: int) -> None:
    asked = shape(256, 640, head_dim, "deterministic", causal=LOWER_RIGHT)
    mask = random_mask(asked, 0.6, 64, 64, heads=2)
    alone, *others = (check(asked, mask, programs) for programs in (1, 2, 7))
    for found in others:
        assert all(map(torch.equal, alone, found))

"""Gradients of the Hopper backward with ALiBi, masks and dropout on a GPU, against float64 autograd."""

from itertools import product
from typing import Any

import pytest
import torch

from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.shape import Causal
from tests.kernels.hopper.backward.test_flash_bwd_hopper_general import (
    KERNEL,
    LENGTHS_K,
    LENGTHS_Q,
    backward,
    compare,
    default,
    problem,
    same_bits,
)
from tests.support.attention.feature_cases import extras_of, packed, tensors
from tests.support.hopper_gpu import skip_elsewhere

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120, method="thread"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]

WORDS = ("alibi", "boolean", "additive", "dropout")
COMBINATIONS = ("alibi boolean window=200:30", "alibi additive dropout softcap", "boolean dropout")
LENGTHS = ((300, 300), (129, 333), (20, 77), (256, 384))
NO, UPPER_LEFT, LOWER_RIGHT = Causal


@pytest.fixture(autouse=True)
def _hopper_alone() -> None:
    skip_elsewhere(KERNEL)


def drawn(sizes: tuple[int, ...], features: str, dtype: str = "bfloat16") -> torch.Tensor:
    """A mask that hides a fifth of the pairs, of every third query all."""
    numbers = torch.randn(sizes, generator=torch.Generator().manual_seed(4)).cuda()
    seen = numbers > -0.8
    seen[:, :, 1::3] = False
    return seen if features == "boolean" else numbers.to(getattr(torch, dtype)).masked_fill(~seen, float("-inf"))


@pytest.mark.parametrize("causal", [NO, LOWER_RIGHT, UPPER_LEFT])
@pytest.mark.parametrize("features", [*WORDS, *COMBINATIONS])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths_and_causal_masks(head_dim: int, features: str, causal: Causal) -> None:
    for lengths in LENGTHS:
        compare(problem(*lengths, head_dim, causal, features, batch=2))


@pytest.mark.parametrize("features", ["alibi", "boolean", "additive"])
@pytest.mark.parametrize("head_dim", [96, 192, 256])
def test_head_dimensions(head_dim: int, features: str) -> None:
    for causal in (NO, LOWER_RIGHT):
        shape = problem(200, 333, head_dim, causal, features, batch=2, dtype="float16")
        compare(shape, tensors(shape, "bshd"))


@pytest.mark.parametrize("features", WORDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_groups_whole_and_in_parts(head_dim: int, features: str) -> None:
    shape = problem(200, 300, head_dim, LOWER_RIGHT, features, batch=2, num_heads=8, num_heads_kv=2)
    for parts in (1, 2, 4):
        compare(shape, group_parts=parts)


@pytest.mark.parametrize("features", ["boolean", "additive"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_masks_that_heads_entries_or_queries_share(head_dim: int, features: str) -> None:
    shape = problem(200, 300, head_dim, NO, features, batch=2, num_heads=4)
    qkv = tensors(shape)
    for sizes in product((1, 2), (1, 4), (1, 200)):
        compare(shape, qkv, Extras(mask=drawn((*sizes, 300), features)))
        strided = drawn((300, *sizes), features).permute(1, 2, 3, 0)
        compare(shape, qkv, Extras(mask=strided))
    expanded = drawn((2, 1, 1, 300), features).expand(2, 4, 200, 300)
    compare(shape, qkv, Extras(mask=expanded))


@pytest.mark.parametrize("hidden", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_additive_masks_that_hide_with_finite_numbers(head_dim: int, hidden: float) -> None:
    shape = problem(130, 260, head_dim, NO, "additive")
    mask = torch.zeros(1, 1, 130, 260, device="cuda")
    mask[..., 100:], mask[:, :, ::2, :40] = hidden, hidden
    compare(shape, tensors(shape), Extras(mask=mask))


@pytest.mark.parametrize("features", ["alibi", "boolean", "dropout", "alibi additive dropout window=170:20"])
@pytest.mark.parametrize("causal", [NO, UPPER_LEFT, LOWER_RIGHT])
def test_packed_sequences(causal: Causal, features: str) -> None:
    shape = problem(128, 257, 128, causal, f"varlen {features}", batch=7, num_heads=4)
    compare(shape, *packed(shape, LENGTHS_Q, LENGTHS_K))


@pytest.mark.parametrize("features", WORDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_fixed_order_gives_the_same_bits(head_dim: int, features: str) -> None:
    shape = problem(700, 900, head_dim, LOWER_RIGHT, f"{features} deterministic", num_heads=4, num_heads_kv=2)
    assert same_bits([compare(shape) for _ in range(4)])


@pytest.mark.parametrize("features", WORDS)
def test_the_short_launch_gives_the_same(features: str) -> None:
    shape = problem(300, 333, 128, LOWER_RIGHT, f"{features} deterministic")
    launch: Any = KERNEL.bind(default(shape), backward(shape))

    def arguments(seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        q, k, v = (torch.randn_like(tensor) for tensor in tensors(shape))
        out, lse, gradients = (
            torch.randn_like(q),
            torch.rand(q.shape[:3], device="cuda") + 5,
            map(torch.empty_like, (q, k, v)),
        )
        return q, k, v, out, lse, torch.randn_like(q), *gradients, 0.1, extras_of(shape, seed)

    short = launch.pinned(*arguments(1))
    for seed in (1, 2, 3):
        given, again = arguments(seed), arguments(seed)
        short(*given)
        launch(*again)
        assert same_bits([given[6:9], again[6:9]])

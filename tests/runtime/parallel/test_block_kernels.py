"""Blocks of ranks by kernels: their outputs, and their shares of gradients where the log-sum-exp is over all keys."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune import Dispatcher, SequenceLayout
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.dispatch import obstacles, resolver
from blocktune.runtime.dispatch.launches.plans import KernelPlan
from blocktune.runtime.parallel.block_attention import FinishedRows, ScoreOptions, attend_block, gradients_of_block
from blocktune.runtime.parallel.plan.blocks import AttentionBlock, Sight
from blocktune.runtime.parallel.plan.steps import steps_of
from blocktune.runtime.parallel.row_sums import AttentionSums
from tests.support.fakes.dispatch_fakes import ListSource
from tests.support.triton_modes import DEVICE, ON_GPU, runs

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]
INF = float("inf")
UNIT, DIM = (50, 128) if ON_GPU else (1, 16)
"""On a GPU, what the kernels of long sequences take."""
LENGTH = 24 * UNIT
SIGHTS = {
    "causal": Sight(INF, 0, (0, LENGTH)),
    "window": Sight(9 * UNIT, 3 * UNIT, (0, LENGTH)),
    "packed": Sight(6 * UNIT, 0, (0, 5 * UNIT, 9 * UNIT, 20 * UNIT, LENGTH)),
}


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    """One whose kernels run here."""
    if not ON_GPU:
        monkeypatch.setattr(obstacles, "KERNEL_DEVICE", "cpu")
        monkeypatch.setattr(resolver, "current_device", lambda index: device_named("a100"))
    return Dispatcher(ListSource())


def numbers(dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.randn(1, *sizes, DIM, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype).to(DEVICE)


def whole(sight: Sight, softcap: float, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp by definition, in float64."""
    q, k, v = leaves
    place = torch.arange(LENGTH, device=q.device)
    document = torch.bucketize(place, torch.tensor(sight.bounds[1:], device=q.device), right=True)
    distance = place - place[:, None]
    seen = (distance >= -sight.left) & (distance <= sight.right) & (document == document[:, None])
    scores = q @ k.repeat_interleave(2, 1).mT * DIM**-0.5
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    scores = scores.masked_fill(~seen, -INF)
    return scores.softmax(-1) @ v.repeat_interleave(2, 1), scores.logsumexp(-1)


@runs
@pytest.mark.parametrize(
    ("dtype", "name", "softcap"),
    [
        (torch.float16, "causal", 0.0),
        (torch.float16, "window", 2.0),
        (torch.float16, "packed", 0.0),
        (torch.float32, "causal", 0.0),
    ],
)
def test_the_blocks_of_all_ranks_add_up(dispatcher: Dispatcher, dtype: torch.dtype, name: str, softcap: float) -> None:
    sight, layout = SIGHTS[name], SequenceLayout.zigzag(LENGTH, 2)
    q, k, v = numbers(dtype, 2, LENGTH), numbers(dtype, 1, LENGTH), numbers(dtype, 1, LENGTH) / 2
    doubles = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    out, lse = whole(sight, softcap, doubles)
    grad, grad_lse = numbers(dtype, 2, LENGTH) * 0.5, torch.rand(1, 2, LENGTH, device=DEVICE)
    right = torch.autograd.grad((out, lse), doubles, (grad.double(), grad_lse.double()))
    rows = FinishedRows(out.detach().to(dtype), lse.detach().float(), grad, grad_lse)
    found = [torch.zeros_like(tensor) for tensor in doubles]
    shared = ScoreOptions(DIM**-0.5, softcap, deterministic=True)
    for rank in range(2):
        places = [torch.cat([torch.arange(*part, device=DEVICE) for part in own]) for own in layout.ranges]
        steps = steps_of(layout, sight, rank, gathers=False)
        sums = AttentionSums(q[:, :, places[rank]], DIM, [block.queries for step in steps for block in step.blocks])
        for number, step in enumerate(steps):
            source = places[rank] if number == 0 else _sent(layout, sight, rank, places[1 - rank])
            for block in step.blocks:
                queries, keys = places[rank][slice(*block.queries)], source[slice(*block.keys)]
                part = q[:, :, queries], k[:, :, keys], v[:, :, keys]
                sums.add(block.queries, *attend_block(*part, block, shared, dispatcher))
                own = FinishedRows(*(one[:, :, queries] for one in (rows.out, rows.lse, rows.grad, grad_lse)))
                of_block = gradients_of_block(*part, own, block, shared, dispatcher)
                for total, one, where in zip(found, of_block, (queries, keys, keys), strict=True):
                    total.index_add_(2, where, one.double())
        tolerance = 2e-3 if dtype is torch.float16 else 1e-5
        assert_close(sums.results()[0], out[:, :, places[rank]], tolerance)
        assert_close(sums.results()[1], lse[:, :, places[rank]], tolerance)
    for one, wanted in zip(found, right, strict=True):
        assert_close(one, wanted, 4e-3 if dtype is torch.float16 else 1e-5)
    plans = list(dispatcher._resolver.plans.values())
    backwards = 0 if dtype is torch.float32 else len(plans) // 2  # kernels find statistics of float32 rows themselves
    assert all(isinstance(own, KernelPlan) for own in plans)
    assert sum("backward" in own.explanation.shape.label for own in plans) == backwards
    assert plans


def _sent(layout: SequenceLayout, sight: Sight, rank: int, theirs: Tensor) -> Tensor:
    """Return the positions of the keys that the other one of two ranks sends."""
    transfers = steps_of(layout, sight, 1 - rank, gathers=False)[1].sent
    return torch.cat([theirs[slice(*transfer.rows)] for transfer in transfers] or [theirs[:0]])


def assert_close(found: Tensor, right: Tensor, tolerance: float) -> None:
    assert (found.double() - right).norm() <= tolerance * right.norm()


@runs
def test_a_scale_that_kernels_do_not_take_is_computed(dispatcher: Dispatcher) -> None:
    q, k, v = numbers(torch.float16, 4, 5), numbers(torch.float16, 2, 7), numbers(torch.float16, 2, 7)
    block = AttentionBlock((0, 5), (0, 7), Causal.LOWER_RIGHT, (-1, -1))
    shared: Any = ScoreOptions(-0.25, 0.0, deterministic=False)
    out, lse = attend_block(q, k, v, block, shared, dispatcher)
    other, other_lse = attend_block(-q, k, v, block, ScoreOptions(0.25, 0.0, deterministic=False), dispatcher)
    assert_close(out, other.double(), 2e-3)
    assert_close(lse, other_lse.double(), 2e-3)
    assert len(dispatcher._resolver.plans) == 1

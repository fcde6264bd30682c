"""Long blocks of a backward over ranks run in parts of their queries."""

import pytest
import torch

from blocktune import attention
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.parallel import ring as rings
from blocktune.runtime.parallel.block_attention import ScoreOptions
from blocktune.runtime.parallel.plan.blocks import AttentionBlock
from blocktune.runtime.parallel.plan.steps import RankStep
from blocktune.runtime.parallel.ring import RankRing, RingAttention

SCALE = 0.125
UNLIMITED = (-1, -1)


def ring_of(*blocks: AttentionBlock) -> RankRing:
    """A ring of one rank with these blocks of its 96 keys."""
    return RankRing(None, (RankStep(96, (), (), blocks),), ScoreOptions(SCALE, 0.0, False), attention)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 16 queries, of blocks of more than 32."""
    monkeypatch.setattr(rings, "LONG_WALK", 32)
    monkeypatch.setattr(rings, "SHORT_WALK", 16)


@pytest.mark.usefixtures("short")
def test_only_long_blocks_that_see_all_keys_are_cut() -> None:
    plain = AttentionBlock((10, 50), (0, 96), Causal.NONE, UNLIMITED)
    causal = AttentionBlock((50, 100), (0, 96), Causal.LOWER_RIGHT, UNLIMITED)
    few = AttentionBlock((100, 132), (0, 96), Causal.NONE, UNLIMITED)
    (step,) = ring_of(plain, causal, few).in_short_walks().steps
    assert [block.queries for block in step.blocks] == [(10, 26), (26, 42), (42, 50), (50, 100), (100, 132)]
    assert all(block.keys == (0, 96) for block in step.blocks)
    assert [block.causal for block in step.blocks] == [Causal.NONE] * 3 + [Causal.LOWER_RIGHT, Causal.NONE]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_of_parts_are_those_of_the_whole(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(2, heads, 96, 64, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4)]
    query, key, value, grad = (tensor.to(dtype) for tensor in drawn)
    wanted = [tensor.double().clone().requires_grad_() for tensor in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*wanted, scale=SCALE, enable_gqa=True)
    expected.backward(grad.double())
    given = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    out, _ = RingAttention.apply(*given, None, ring_of(AttentionBlock((0, 96), (0, 96), Causal.NONE, UNLIMITED)))
    out.backward(grad)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for own, other in zip(given, wanted, strict=True):
        assert own.grad is not None
        assert other.grad is not None
        largest = float(other.grad.abs().max())
        assert float((own.grad.double() - other.grad).abs().max()) <= tolerance * largest
